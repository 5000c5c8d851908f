"""ResNet-18 with GroupNorm in place of BatchNorm: no running statistics, so models can be averaged."""

from __future__ import annotations

from torch import Tensor, nn

from ..errors import FedeveError, unknown
from .lenet import _image_shape
from .norm import NormReLU

WIDTHS = (64, 128, 256, 512)
STEMS = ("cifar", "imagenet")


class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2016), 11,220,132 parameters for 100 classes of 32x32; takes [B, H, W] or [B, C, H, W].

    The stem `cifar` keeps the size of the image, 3x3 without max-pool; `imagenet` quarters it, 7x7 and max-pool.
    Every norm has `groups` groups of channels: 2 in the code of the FedEve paper's authors.
    """

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int, *, stem: str = "cifar", groups: int = 2) -> None:
        super().__init__()
        channels, _, _ = _image_shape(input_shape, smallest=8)
        if stem not in STEMS:
            raise unknown("model.stem", stem, STEMS)
        if not isinstance(groups, int) or isinstance(groups, bool) or groups < 1 or WIDTHS[0] % groups:
            raise FedeveError(
                "model.groups must divide the channels", got=groups, do=f"write a divisor of {WIDTHS[0]}: 1, 2, 4 ..."
            )
        first = [nn.Conv2d(channels, WIDTHS[0], 3, padding=1, bias=False), NormReLU(groups, WIDTHS[0])]
        if stem == "imagenet":
            first[0] = nn.Conv2d(channels, WIDTHS[0], 7, stride=2, padding=3, bias=False)
            first.append(nn.MaxPool2d(3, stride=2, padding=1))
        self.stem = nn.Sequential(*first)
        blocks, width = [], WIDTHS[0]
        for stage, wider in enumerate(WIDTHS):
            blocks += [_Block(width, wider, 1 if stage == 0 else 2, groups), _Block(wider, wider, 1, groups)]
            width = wider
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, num_outputs)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1) if x.ndim == 3 else x
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean((-2, -1)))
        return logits


class _Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the size changes."""

    def __init__(self, before: int, after: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = NormReLU(groups, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = NormReLU(groups, after)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.GroupNorm(groups, after)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv2(self.norm1(self.conv1(x)))
        out: Tensor = self.norm2(inner, self.shortcut(x))
        return out

"""Handwriting made on the spot: 62 classes of 28x28 characters by any number of writers, shaped like FEMNIST.

The outlines of matplotlib's fonts are thinned to the path of a pen; each writer redraws it in its own hand.
Integers and exactly rounded arithmetic make the pixels, so a seed gives the same bytes on every machine.
Nothing is downloaded, cached on disk or turned into tensors here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from typing import ClassVar

import matplotlib
import numpy as np
from matplotlib.ft2font import FT2Font, LoadFlags
from matplotlib.path import Path as Outline
from numpy.typing import NDArray

from .. import seeds
from ..errors import FedeveError
from ..settings import setting
from .datasets import Arrays, Dataset

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Images = NDArray[np.uint8]
OneWriter = tuple[Images, Ints, Images, Ints]
AllWriters = tuple[Images, Ints, Ints, Images, Ints, Ints]

CHARACTERS = digits + ascii_uppercase + ascii_lowercase
NUM_CLASSES = len(CHARACTERS)
SIDE = 28

# Thinning takes the weight away, so bold and merely slanted faces would add nothing.
PRINT = ("DejaVuSans", "cmss10", "DejaVuSansMono", "cmtt10", "STIXGeneral")
SCRIPT = ("cmti10", "cmmi10", "STIXGeneralItalic", "DejaVuSerif-Italic")
FONTS = PRINT + SCRIPT
FONT_CHOICES = np.repeat(np.arange(len(FONTS)), [5, 5, 2, 1, 1, 3, 2, 2, 1])  # plain ones are more common

# Digits, capitals and small letters in about FEMNIST's shares.
CLASS_PRIOR = np.repeat([0.49 / 10, 0.27 / 26, 0.24 / 26], [10, 26, 26])

CELLS = 96  # cells along one side of a template
CELLS_PER_PIXEL = 3
STEPS_PER_CELL = 16  # resolution of a template's distances
CAPITAL, LARGEST = 54, 66  # height of a capital and longest side of any character in cells

# Half-waves down and right in the wobble of a hand: only slow ones.
WAVES = tuple((down, right) for down in range(4) for right in range(4) if 2 <= down + right <= 4)
BATCH = 256  # images drawn at once: few enough for their temporaries to stay in the cache

# One stream of random numbers for each purpose; those of a part of the data are for labels, motion and noise.
SIZES, HAND, TASTE = "sizes", "hand", "taste"
TRAIN = ("train labels", "train motion", "train noise")
TEST = ("test labels", "test motion", "test noise")
SHEET = ("sheet motion", "sheet noise")
Purposes = tuple[str, str, str]


@dataclass(frozen=True, kw_only=True)
class Glyphs(Dataset):
    """Handwriting-like characters made on the spot, FEMNIST-shaped: 62 classes, 28x28, any number of writers."""

    num_writers: int = setting(300, help="how many writers; FEMNIST has 3,400", low=1)
    num_images: int | None = setting(None, help="training images; 60 a writer unless set (FEMNIST: 671,585)", low=1)
    num_test: int | None = setting(None, help="test images; a tenth of the training images unless set", low=0)

    citation: ClassVar[str] = "the shape is FEMNIST's: Caldas et al., LEAF, 2018"

    def arrays(self) -> Arrays:
        num_images = 60 * self.num_writers if self.num_images is None else self.num_images
        if num_images < 2 * self.num_writers:
            raise FedeveError(
                "every writer needs at least 2 images",
                got=num_images,
                do=f"set data.num_images to {2 * self.num_writers}",
            )
        num_test = num_images // 10 if self.num_test is None else self.num_test
        x, y, writers, x_test, y_test, _ = _drawn(self.num_writers, num_images, num_test, self.seed)
        # Mean and deviation of the ink, as pixels are normalised in the paper; taken from what was drawn.
        sample = x[:: max(len(x) // 5000, 1)]
        return Arrays(x, y, writers, x_test, y_test, NUM_CLASSES, float(sample.mean()), 1 / float(sample.std()))


def _generator(seed: int, writer: int, purpose: str) -> np.random.Generator:
    return seeds.generator(seed, "glyphs", writer, purpose)


def _bell(generator: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    # The sum of four integers is close to normal and, unlike a normal draw, needs no logarithm.
    total: Ints = generator.integers(0, 65536, (*shape, 4), dtype=np.uint16).sum(axis=-1, dtype=np.int64)
    return (total - 131070) / 37837.0


def _segments(outline: Outline) -> Floats:
    """The outline as straight segments [segment, (start, end), (x, y)]."""
    contours: list[list[Floats]] = []
    for values, code in outline.iter_segments(simplify=False):
        points = np.asarray(values, dtype=np.float64).reshape(-1, 2)
        if code == Outline.MOVETO:
            contours.append([points[0]])
        elif code == Outline.LINETO:
            contours[-1].append(points[0])
        elif code == Outline.CURVE3:
            begin, (middle, end) = contours[-1][-1], points
            for t in (0.25, 0.5, 0.75, 1.0):
                contours[-1].append((1 - t) * (1 - t) * begin + 2 * t * (1 - t) * middle + t * t * end)
    return np.concatenate([np.stack([points, np.roll(points, -1, axis=0)], axis=1) for points in contours])


def _outlines(font: str) -> list[Floats]:
    """Each character's segments in cells, centred in its template, y downwards."""
    face = FT2Font(str(Path(matplotlib.get_data_path(), "fonts", "ttf", f"{font}.ttf")))
    outlines = []
    for character in CHARACTERS:
        # Unscaled outlines are the font file's own integers: no version of a rasteriser enters the pixels.
        face.load_char(ord(character), flags=LoadFlags.NO_SCALE)
        outlines.append(_segments(Outline(*face.get_path())) * [1.0, -1.0])
    capital = np.ptp(outlines[CHARACTERS.index("H")][..., 1])
    for label, outline in enumerate(outlines):
        low, high = outline.min(axis=(0, 1)), outline.max(axis=(0, 1))
        scale = min(CAPITAL / capital, LARGEST / (high - low).max())
        outlines[label] = (outline - (low + high) / 2) * scale + CELLS / 2
    return outlines


def _inside(segments: Floats) -> Bools:
    """Which cells lie inside the outline, by the winding number along each row of cells."""
    centres = np.arange(CELLS) + 0.5
    (x0, y0), (x1, y1) = segments.transpose(1, 2, 0)
    segment, row = np.nonzero((y0[:, None] <= centres) != (y1[:, None] <= centres))
    slope = (x1 - x0)[segment] / (y1 - y0)[segment]
    column = np.ceil(x0[segment] + (centres[row] - y0[segment]) * slope - 0.5).astype(np.int64)
    turns = np.zeros((CELLS, CELLS), dtype=np.int64)
    np.add.at(turns, (row, column), np.where(y1 > y0, 1, -1)[segment])
    return np.cumsum(turns, axis=1).astype(bool)


def _removable() -> Bools:
    """Zhang and Suen's rule: may a cell go [half-step, neighbours as eight bits clockwise from north]."""
    rule = np.zeros((2, 256), dtype=bool)
    for code in range(256):
        ring = [code >> bit & 1 for bit in range(8)]
        north, east, south, west = ring[::2]
        starts = sum(ring[bit - 1] < ring[bit] for bit in range(8))
        if 2 <= sum(ring) <= 6 and starts == 1:
            rule[0, code] = not (north and east and south) and not (east and south and west)
            rule[1, code] = not (north and east and west) and not (north and south and west)
    return rule


def _thin(ink: Bools) -> Bools:
    """Shapes [n, cells, cells] thinned to lines one cell wide."""
    steps = (-CELLS, 1 - CELLS, 1, CELLS + 1, CELLS, CELLS - 1, -1, -CELLS - 1)  # clockwise from north
    corner = 0b00011100  # ink to the east, south-east and south only
    rules, flat, before = _removable(), ink.ravel(), -1
    while before != (before := int(flat.sum())):
        for rule in rules:
            code = np.zeros(flat.shape, dtype=np.uint8)
            for bit, step in enumerate(steps):
                code |= np.roll(flat, -step).view(np.uint8) << np.uint8(bit)
            gone = flat & rule[code]
            # A block of two by two would vanish as a whole, and the dot of an i with it: its corner stays.
            flat = flat & ~(gone & ~((code == corner) & np.roll(gone, -CELLS - 1)))
    return flat.reshape(ink.shape)


def _distance(line: Bools) -> Images:
    """Each cell's distance from the line in steps, up to 255."""
    reach = 256 // STEPS_PER_CELL
    square = np.where(line, 0, reach**2).astype(np.int32)
    for axis in (1, 2):
        nearest = square.copy()
        for offset in range(1 - reach, reach):
            np.minimum(nearest, np.roll(square, offset, axis=axis) + offset**2, out=nearest)
        square = nearest
    steps: Floats = np.minimum(np.sqrt(square) * STEPS_PER_CELL, 255)
    return steps.astype(np.uint8)


@lru_cache(maxsize=1)
def _templates() -> Images:
    """Distances from the pen's path, flat over [font, class, row, column]."""
    shapes = (np.stack([_inside(outline) for outline in _outlines(font)]) for font in FONTS)
    return np.stack([_distance(_thin(shape)) for shape in shapes]).ravel()


class _Hand:
    """How a writer draws; lengths are in pixels where nothing else is said."""

    def __init__(self, seed: int, writer: int) -> None:
        generator = _generator(seed, writer, HAND)
        usual, *borrowed = FONT_CHOICES[generator.integers(len(FONT_CHOICES), size=1 + NUM_CLASSES)]
        slant, turn, down, right = _bell(generator, (4,)).tolist()
        size, aspect, pen, blur, ink, unrest = generator.random(6).tolist()
        self.forms = np.where(generator.random(NUM_CLASSES) < 0.6, usual, borrowed)  # [class] font
        self.habits = 2.0 * _bell(generator, (NUM_CLASSES, 2, len(WAVES)))  # lasting wobble in cells
        self.size = 0.68 + 0.44 * size
        self.aspect = 0.88 + 0.26 * aspect  # its square is height over width
        self.slant = 0.08 + 0.16 * slant
        self.turn = 0.03 * turn  # tangent of half the angle
        self.shift = (0.7 * down, 0.7 * right)
        self.pen = 0.55 + 0.8 * pen  # half the width of a stroke
        self.blur = 0.9 + 1.1 * blur  # width of a stroke's edge
        self.ink = int(170 + 86 * ink)  # grey level of a full stroke
        self.grain = int(80 * generator.random(4).min())  # grey levels of noise: little for most writers
        self.unrest = 0.6 + 0.8 * unrest  # how much one image differs from the next


def _taste(seed: int, writer: int) -> Ints:
    """Running totals of a writer's class weights: the common prior times a Dirichlet draw of parameter 2."""
    # Rounded here as below: the last digit of a logarithm or a cosine may differ between processors.
    exponentials = -np.log(1 - _generator(seed, writer, TASTE).random((NUM_CLASSES, 2)))
    return np.cumsum(1 + np.rint(1e6 * CLASS_PRIOR * exponentials.sum(axis=1)).astype(np.int64))


@lru_cache(maxsize=1)
def _planes() -> NDArray[np.float32]:
    """One, the place down, the place right and the waves of a wobble [3 + wave, pixel]."""
    place = np.arange(SIDE) - (SIDE - 1) / 2
    cosines = np.cos(np.pi / SIDE * np.arange(4)[:, None] * (np.arange(SIDE) + 0.5))
    planes = [np.ones((SIDE, SIDE)), *np.meshgrid(place, place, indexing="ij")]
    for down, right in WAVES:
        wave = np.outer(cosines[down], cosines[right]) * 2 / (down + right)  # slow waves are high ones
        planes.append(np.rint(32 * wave) / 32)
    return np.stack(planes).reshape(len(planes), -1).astype(np.float32)


def _weights(hand: _Hand, labels: Ints, size: Floats, unrest: Floats) -> NDArray[np.float32]:
    """The planes' weights that turn pixels into cells of a template [image, (down, right), 3 + wave]."""
    zoom = size[:, None] * [hand.aspect, 1 / hand.aspect] / CELLS_PER_PIXEL
    slant = hand.slant + 0.06 * unrest[:, 0]
    turn = hand.turn + 0.025 * unrest[:, 1]
    # The rational form of a rotation needs no sine.
    cosine, sine = (1 - turn * turn) / (1 + turn * turn), 2 * turn / (1 + turn * turn)
    weights = np.empty((len(labels), 2, 3 + len(WAVES)))
    weights[:, 0, 1:3] = np.stack([cosine, sine], axis=1)
    weights[:, 1, 1:3] = np.stack([slant * cosine - sine, slant * sine + cosine], axis=1)
    weights[:, :, 1:3] /= zoom[:, :, None]
    down, right = (hand.shift + 0.5 * unrest[:, 2:4]).T[:, :, None]
    weights[:, :, 0] = CELLS / 2 - weights[:, :, 1] * down - weights[:, :, 2] * right
    weights[:, :, 3:] = hand.habits[labels] + unrest[:, 4:].reshape(len(labels), 2, -1)
    # Multiples of 1/512 times multiples of 1/32, below 1024 in sum, fit the 24 bits of single precision: the
    # matrix product is exact in whatever order it adds.
    assert (np.abs(weights) @ np.abs(_planes()).max(axis=1)).max() < 1024
    return (np.rint(512 * weights) / 512).astype(np.float32)


def _images(hand: _Hand, labels: Ints, motion: np.random.Generator, noise: np.random.Generator) -> Images:
    """The labels in this hand [image, row, column]; both generators advance image by image."""
    unrest = hand.unrest * _bell(motion, (len(labels), 6 + 2 * len(WAVES)))
    size = hand.size * (1 + 0.12 * unrest[:, 0])
    weights = _weights(hand, labels, size, unrest[:, 2:])
    # One product per image is too small for BLAS to start threads, which would stall on a busy machine.
    cells = np.clip(weights @ _planes(), 0, CELLS - 1).astype(np.int32)
    origin = ((hand.forms * NUM_CLASSES + np.arange(NUM_CLASSES)) * CELLS**2).astype(np.int32)
    distance = _templates().take(origin[labels, None] + cells[:, 0] * CELLS + cells[:, 1])
    steps = STEPS_PER_CELL * CELLS_PER_PIXEL
    edge, pen = hand.blur * steps / hand.size, hand.pen * (1 + 0.06 * unrest[:, 1]) * steps / size
    reach = np.minimum(np.rint(pen + edge / 2), 240).astype(np.int16)  # the rim of a template stays bare
    stroke = np.clip((reach[:, None] - distance) * np.int16(8 * 255 / edge) >> 3, 0, hand.ink)
    grain = np.frombuffer(noise.bytes(stroke.size), dtype=np.int8).reshape(stroke.shape)
    image: NDArray[np.int16] = np.clip(stroke + (grain * np.int16(hand.grain) >> 7), 0, 255)
    return image.astype(np.uint8).reshape(-1, SIDE, SIDE)


def _fill(writer: int, seed: int, purposes: Purposes, x: Images, y: Ints) -> None:
    """Overwrites x and y with one part of a writer's images and labels."""
    hand, taste = _Hand(seed, writer), _taste(seed, writer)
    choice, motion, noise = (_generator(seed, writer, purpose) for purpose in purposes)
    for start in range(0, len(y), BATCH):
        part = slice(start, start + BATCH)
        y[part] = np.searchsorted(taste, choice.integers(taste[-1], size=len(y[part])), side="right")
        x[part] = _images(hand, y[part], motion, noise)


def _share(weights: Ints, total: int) -> Ints:
    # Rounding the running totals instead of the parts makes the parts add up exactly.
    ends: Ints = np.cumsum(weights) * total // weights.sum()
    return np.diff(ends, prepend=0)


def _draw(sizes: Ints, seed: int, purposes: Purposes, *, first: int = 0) -> tuple[Images, Ints]:
    """One part of the images and labels of the writers from the first on, in order."""
    x, y = np.empty((sizes.sum(), SIDE, SIDE), dtype=np.uint8), np.empty(sizes.sum(), dtype=np.int64)
    ends = np.cumsum(sizes)
    for writer, (start, end) in enumerate(zip(ends - sizes, ends, strict=True), first):
        _fill(writer, seed, purposes, x[start:end], y[start:end])
    return x, y


def writer_sizes(num_writers: int, *, num_images: int, num_test: int, seed: int) -> tuple[Ints, Ints]:
    """Long-tailed numbers of training and of test images [writer] that add up exactly to the two totals."""
    generator = _generator(seed, 0, SIZES)
    share = np.exp(0.36 * _bell(generator, (num_writers,)))
    gives_up, done = generator.random((2, num_writers))
    share = np.where(gives_up < 0.05, share * done, share)
    floor = 16 if num_images >= 32 * num_writers else min(2, num_images // num_writers)
    weights = 1 + np.rint(1e6 * np.maximum(share - 0.09, 0)).astype(np.int64)
    train = floor + _share(weights, num_images - floor * num_writers)
    return train, _share(train, num_test)


def draw_writer(writer: int, *, num_train: int, num_test: int, seed: int) -> OneWriter:
    """One writer's x [num_train, 28, 28], y [num_train], x_test [num_test, 28, 28] and y_test [num_test]."""
    train = _draw(np.array([num_train]), seed, TRAIN, first=writer)
    return *train, *_draw(np.array([num_test]), seed, TEST, first=writer)


def stream(num_writers: int, *, num_images: int, num_test: int, seed: int) -> Iterator[OneWriter]:
    """The x, y, x_test and y_test of draw_writer, one writer at a time and in order."""
    sizes = writer_sizes(num_writers, num_images=num_images, num_test=num_test, seed=seed)
    for writer, (train, test) in enumerate(zip(*sizes, strict=True)):
        yield draw_writer(writer, num_train=int(train), num_test=int(test), seed=seed)


def draw(num_writers: int, *, num_images: int, num_test: int, seed: int) -> AllWriters:
    """All writers' x [n, 28, 28], y [n], writers [n], x_test [m, 28, 28], y_test [m], writers_test [m]."""
    sizes = writer_sizes(num_writers, num_images=num_images, num_test=num_test, seed=seed)
    writers, writers_test = (np.repeat(np.arange(num_writers), part) for part in sizes)
    return *_draw(sizes[0], seed, TRAIN), writers, *_draw(sizes[1], seed, TEST), writers_test


@lru_cache(maxsize=1)
def _drawn(num_writers: int, num_images: int, num_test: int, seed: int) -> AllWriters:
    """As `draw`, the last of them kept: a sweep's partitions are of the same images, which nobody may change."""
    drawn = draw(num_writers, num_images=num_images, num_test=num_test, seed=seed)
    for array in drawn:
        array.flags.writeable = False
    return drawn


def sheet(num_writers: int = 8, *, seed: int = 0, columns: str = "0123456789ABEGMQRSabdefghkqsty") -> Images:
    """A picture [28 * num_writers, 28 * len(columns)]: a row for each writer, a column for each character."""
    labels = np.array([CHARACTERS.index(character) for character in columns])
    rows = []
    for writer in range(num_writers):
        motion, noise = (_generator(seed, writer, purpose) for purpose in SHEET)
        rows.append(list(_images(_Hand(seed, writer), labels, motion, noise)))
    return np.block(rows)

"""Files of Federated EMNIST as TensorFlow Federated and LEAF write them, with a few made-up writers."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np

Content = dict[str, tuple[np.ndarray, np.ndarray]]

# In no order, as LEAF lists them; f0900_22 has letters only.
SIZES = {"f3100_05": (12, 3), "f0000_14": (7, 2), "f0900_22": (5, 2), "f2000_40": (30, 4)}


def make(part: int, *, seed: int = 0) -> Content:
    """Ink [n, 28, 28] as bytes and labels [n] of every writer."""
    rng = np.random.default_rng([seed, part])
    content = {}
    for name, sizes in SIZES.items():
        lowest = 10 if name == "f0900_22" else 0
        images = rng.integers(0, 256, (sizes[part], 28, 28), dtype=np.uint8)
        images[rng.random(images.shape) < 0.8] = 0
        content[name] = images, rng.integers(lowest, 62, sizes[part])
        content[name][1][0] = 10 if lowest else 9  # the limits of what is a digit are met
    return content


def write_tff(path: Path, content: Content, **changes: Any) -> None:
    """As TensorFlow Federated wrote it: float32 pixels with paper at 1, int32 labels."""
    with h5py.File(path, "w") as file:
        for name, (images, labels) in content.items():
            group = file.create_group(f"examples/{name}")
            white = (255 - images).astype(np.float32) / np.float32(255)
            group.create_dataset("pixels", data=white, dtype=np.float32, **changes)
            group.create_dataset("label", data=labels.astype(np.int32), **changes)


def leaf_table(content: Content) -> dict[str, Any]:
    """As LEAF's data_to_json.py makes it: grey levels / 255 in a row of 784, paper at 1."""
    data = {
        name: {"x": ((255 - images.reshape(-1, 784)) / 255).tolist(), "y": labels.tolist()}
        for name, (images, labels) in content.items()
    }
    return {"users": list(data), "num_samples": [len(user["y"]) for user in data.values()], "user_data": data}


def write_leaf(folder: Path, content: Content, *, files: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = list(content)
    for number in range(files):
        part = {name: content[name] for name in names[number::files]}
        path = folder / f"all_data_{number}_niid_0_keep_0_train_9.json"
        path.write_text(json.dumps(leaf_table(part)))


def stacked(content: Content) -> tuple[np.ndarray, np.ndarray]:
    parts = [content[name] for name in sorted(content)]
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


def pack(tff: Path, path: Path, names: dict[str, str]) -> None:
    with tarfile.open(path, "w:bz2") as tar:
        for name, inside in names.items():
            tar.add(tff / name, arcname=inside)


NAMES = {name: name for name in ("fed_emnist_test.h5", "fed_emnist_train.h5")}

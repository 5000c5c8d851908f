"""Full-size FEMNIST: how long conversion takes, with how much memory, and how long a later open.

The files are generated from `glyphs` in TensorFlow Federated's format, in a folder made below the one given (2.7 GB,
the cache included) and removed at the end: python benchmarks/femnist.py FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import h5py
import numpy as np
from machine import save

from fedeve import datasets
from fedeve.data import glyphs

MIB = 2**20


def main() -> None:
    """Generate, convert in one process, open in another, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where there is room for the files")
    parser.add_argument("--writers", type=int, default=3400)
    parser.add_argument("--images", type=int, default=671_585)
    parser.add_argument("--test", type=int, default=77_483)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(_load(options.folder)))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="femnist-", dir=options.folder) as name:
        folder = Path(name)
        start = time.perf_counter()
        generate(folder, num_writers=options.writers, num_images=options.images, num_test=options.test)
        generated = time.perf_counter() - start
        source = sum(path.stat().st_size for path in folder.glob("*.h5"))
        convert, reopen = _child(folder), _child(folder)
        cache = sum(path.stat().st_size for path in (folder / "cache").rglob("*.npy"))
    result = {
        "generate_s": round(generated, 1),
        "source_mib": round(source / MIB),
        "cache_mib": round(cache / MIB),
        "convert": convert,
        "open": reopen,
        "memory_above_cache_mib": round(convert["peak_rss_mib"] - convert["before_mib"] - cache / MIB),
    }
    save("femnist", result)


def generate(folder: Path, *, num_writers: int, num_images: int, num_test: int) -> None:
    """Write fed_emnist_train.h5 and fed_emnist_test.h5: paper is 1, a full stroke 0."""
    with h5py.File(folder / "fed_emnist_train.h5", "w") as train, h5py.File(folder / "fed_emnist_test.h5", "w") as test:
        writers = glyphs.stream(num_writers, num_images=num_images, num_test=num_test, seed=0)
        for number, (x, y, x_test, y_test) in enumerate(writers):
            for file, images, labels in ((train, x, y), (test, x_test, y_test)):
                group = file.create_group(f"examples/f{number:04d}_{number % 50:02d}")
                group["pixels"] = np.float32(1) - images.astype(np.float32) / np.float32(255)
                group["label"] = labels.astype(np.int32)


def _child(folder: Path) -> dict[str, float]:
    # A process of its own, so that neither the generator's memory nor its warm files count.
    environment = os.environ | {"FEDEVE_CACHE": str(folder / "cache")}
    command = [sys.executable, __file__, str(folder), "--child"]
    return json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)


def _load(folder: Path) -> dict[str, float]:
    before, peak, done = _status("VmRSS"), {"RssAnon": 0.0}, threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peak["RssAnon"] = max(peak["RssAnon"], _status("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    data = datasets.load("femnist", root=str(folder))
    data.fingerprint  # noqa: B018 - a run asks for it at once
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    return {
        "seconds": round(seconds, 3),
        "before_mib": round(before),
        "peak_rss_mib": round(_status("VmHWM")),
        "peak_anonymous_mib": round(peak["RssAnon"]),
        "clients": data.num_clients,
        "train": len(data.y),
        "test": len(data.y_test),
        "mean": round(float(data.shift) / 255, 4),
        "std": round(1 / float(data.scale) / 255, 4),
    }


def _status(name: str) -> float:
    """A line of /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()

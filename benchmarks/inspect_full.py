"""`fedeve drift inspect` on full-size FEMNIST-shaped data: seconds and memory, making the images included.

python benchmarks/inspect_full.py
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

from machine import save


def main() -> None:
    """Run the command in a process of its own and save what it took."""
    options = ["--set", "num_writers=3400", "--set", "num_images=671585", "--set", "num_test=77483"]
    start = time.perf_counter()
    command = [sys.executable, "-m", "fedeve", "drift", "inspect", "glyphs", *options, "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    seconds, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    picture = json.loads(done.stdout)
    save(
        "inspect",
        {
            "seconds": round(seconds, 1),
            "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
            "peak_rss_mib": round(used.ru_maxrss / 1024),
            "images_mib": round((671_585 + 77_483) * 784 / 2**20),
            **{key: picture[key] for key in ("num_clients", "num_examples", "num_classes", "heterogeneity", "halving")},
        },
    )


if __name__ == "__main__":
    main()

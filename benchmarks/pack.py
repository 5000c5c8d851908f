"""How small 1,500 long runs in six sweeps become by `fedeve pack`, how large their page is, how long both take.

`python benchmarks/pack.py [FILE]`; with FILE the page is kept there.

The records are those of `report.py`; one sweep has the six metrics of a recommender. Random walks do not compress well.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import save

import report as made
from fedeve.experiments.pack import pack
from fedeve.report import page, results

SWEEPS, SHAPE = 6, {"ROWS": 10, "COLUMNS": 5, "SEEDS": 5}
METRICS = {"auc": 1.0, "hr@5": 0.5, "hr@10": 0.6, "ndcg@5": 0.3, "ndcg@10": 0.35, "loss": 0.9}


def build(folder: Path, number: int) -> None:
    """A sweep of 250 runs; the first has six metrics."""
    made.build(folder, every=made.EVERY)
    path = folder / "sweep.json"
    table = json.loads(path.read_text()) | {"title": f"Sweep {number}", "engine": "lanes"}
    if number == 0:
        table |= {"metrics": [*METRICS], "printed": {}}
        for record in folder.glob("runs/*/record.jsonl"):
            head, *lines = record.read_text().splitlines()
            record.write_text("\n".join([head, *(json.dumps(recommender(json.loads(line))) for line in lines)]) + "\n")
    path.write_text(json.dumps(table))


def recommender(line: dict[str, Any]) -> dict[str, Any]:
    """A line with six metrics instead of two."""
    rest = {key: line[key] for key in ("facts", "answered")}
    return {"round": line["round"], **{name: part * line["accuracy"] for name, part in METRICS.items()}, **rest}


def bench() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        for number in range(SWEEPS):
            build(top / "played" / f"sweep-{number}", number)
        start = time.perf_counter()
        pack([top / "played"], top / "kept")
        packed_in = time.perf_counter() - start
        start = time.perf_counter()
        page.write_page(top / "report.html", results.read([top / "kept"]), title="1,500 long runs", made="a benchmark")
        made_in = time.perf_counter() - start
        if len(sys.argv) > 1:  # keep it, to be looked at
            shutil.copy(top / "report.html", sys.argv[1])
        records = [path.stat().st_size for path in (top / "kept").rglob("*.gz")]
        whole = [path.stat().st_size for path in (top / "kept").rglob("*") if path.is_file()]
        before = [path.stat().st_size for path in (top / "played").rglob("record.jsonl")]
        return {
            "runs": len(records),
            "record_kilobytes": {"before": kilobytes(before), "after": kilobytes(records)},
            "kept_megabytes": round(sum(whole) / 1e6, 2),
            "page_megabytes": round((top / "report.html").stat().st_size / 1e6, 2),
            "pack_seconds": round(packed_in, 1),
            "page_seconds": round(made_in, 1),
        }


def kilobytes(sizes: list[int]) -> dict[str, float]:
    return {"mean": round(sum(sizes) / len(sizes) / 1e3, 2), "largest": round(max(sizes) / 1e3, 2)}


if __name__ == "__main__":
    for key, value in SHAPE.items():
        setattr(made, key, value)
    save("pack", bench())

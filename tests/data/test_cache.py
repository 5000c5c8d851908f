"""The cache: whole or not there, built once, rebuilt when its source or its own format changes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fedeve import FedeveError
from fedeve.data import cache
from fedeve.data.cache import Builder, Cache, cached, source_error


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDEVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.bin"
    path.write_bytes(bytes(range(100)))
    return path


class Numbers:
    """Converts the source's bytes, and counts how often it was asked to."""

    def __init__(self, source: Path) -> None:
        self.source, self.builds = source, 0

    def __call__(self, builder: Builder) -> None:
        self.builds += 1
        values = np.frombuffer(self.source.read_bytes(), np.uint8)
        builder.create("mapped", (len(values), 2), np.int32)[:] = values[:, None]
        builder.create("nothing", (0, 3), np.uint8)
        builder.put("whole", values * 2.0)
        builder.notes["sum"] = int(values.sum())

    def open(self) -> Cache:
        return cached("numbers", [self.source], self)


def folder_of(root: Path) -> Path:
    (folder,) = (path for path in root.iterdir() if path.is_dir())
    return folder


def left_in(root: Path) -> list[str]:
    """What is there besides the files that locks are taken on."""
    return [path.name for path in root.iterdir() if path.suffix != ".lock"] if root.exists() else []


def check(opened: Cache, source: Path) -> None:
    values = np.frombuffer(source.read_bytes(), np.uint8)
    assert np.array_equal(opened.arrays["mapped"], np.stack([values, values], axis=1))
    assert np.array_equal(opened.arrays["whole"], values * 2.0)
    assert opened.arrays["nothing"].shape == (0, 3)
    assert opened.notes == {"sum": int(values.sum())}


def test_what_was_put_in_comes_out_and_is_mapped_not_read(source):
    opened = Numbers(source).open()
    check(opened, source)
    assert isinstance(opened.arrays["mapped"], np.memmap)
    assert isinstance(opened.arrays["whole"], np.memmap)


def test_a_second_open_neither_builds_nor_reads_the_source(source):
    numbers = Numbers(source)
    first = numbers.open()
    before = source.stat()
    source.write_bytes(bytes(100))  # whoever reads it now reads zeros; size and time tell nothing
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    again = numbers.open()
    assert numbers.builds == 1
    assert again.checksum == first.checksum
    assert again.arrays["whole"].sum() == 2 * sum(range(100))


def test_a_large_cache_opens_at_once(source):
    def build(builder: Builder) -> None:
        builder.create("large", (200_000, 784), np.uint8)[::1000] = 7

    cached("large", [source], build)
    start = time.perf_counter()
    opened = cached("large", [source], build)
    assert time.perf_counter() - start < 0.5
    assert opened.arrays["large"][1000, 5] == 7


def test_a_changed_source_rebuilds(source):
    numbers = Numbers(source)
    first = numbers.open()
    source.write_bytes(bytes(range(100, 200)))
    second = numbers.open()
    assert numbers.builds == 2
    assert second.checksum != first.checksum
    check(second, source)


def test_a_touched_source_with_the_same_content_does_not_rebuild(source):
    numbers = Numbers(source)
    numbers.open()
    os.utime(source, ns=(1, 1))
    check(numbers.open(), source)
    assert numbers.builds == 1


def test_each_source_of_several_counts(source, tmp_path):
    other = tmp_path / "other.bin"
    other.write_bytes(b"a")
    numbers = Numbers(source)
    cached("two", [source, other], numbers)
    other.write_bytes(b"b")
    cached("two", [source, other], numbers)
    assert numbers.builds == 2


def test_options_and_places_have_caches_of_their_own(source, tmp_path):
    numbers = Numbers(source)
    for options in ({}, {"side": 1}, {"side": 2}, {"side": 1}):
        cached("numbers", [source], numbers, options=options)
    assert numbers.builds == 3
    source.rename(tmp_path / "moved.bin")
    cached("numbers", [tmp_path / "moved.bin"], Numbers(tmp_path / "moved.bin"))
    check(cached("numbers", [tmp_path / "moved.bin"], numbers), tmp_path / "moved.bin")
    assert numbers.builds == 3


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def with_meta(**changes: object) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps(json.loads(content) | changes).encode()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("meta.json", with_meta(format=cache.FORMAT + 1)),
        ("meta.json", with_meta(format=cache.FORMAT - 1)),
        ("meta.json", lambda content: content[:-5]),
        ("meta.json", lambda content: b""),
        ("meta.json", lambda content: b"[]"),
        ("meta.json", lambda content: b"{}"),
        ("mapped.npy", lambda content: content[:-1]),
        ("mapped.npy", lambda content: content + b"\0"),
        ("whole.npy", lambda content: b""),
    ],
)
def test_a_cache_of_another_format_or_cut_short_is_rebuilt(source, root, name, change):
    numbers = Numbers(source)
    numbers.open()
    rewrite(folder_of(root) / name, change)
    check(numbers.open(), source)
    assert numbers.builds == 2
    check(numbers.open(), source)
    assert numbers.builds == 2


@pytest.mark.parametrize("name", ["meta.json", "mapped.npy", "nothing.npy"])
def test_a_cache_that_lacks_a_file_is_rebuilt(source, root, name):
    numbers = Numbers(source)
    numbers.open()
    (folder_of(root) / name).unlink()
    check(numbers.open(), source)
    assert numbers.builds == 2


def test_what_a_killed_build_left_behind_is_cleared_away(source, root):
    numbers = Numbers(source)
    numbers.open()
    part = folder_of(root).rename(folder_of(root).with_name(folder_of(root).name + ".part"))
    (part / "stranger.npy").write_bytes(b"half an arr")
    check(numbers.open(), source)
    assert left_in(root) == [part.name.removesuffix(".part")]
    assert not (folder_of(root) / "stranger.npy").exists()


def test_an_error_in_the_build_leaves_nothing_and_comes_through(source, root):
    def build(builder: Builder) -> None:
        builder.put("x", np.zeros(10))
        raise source_error(source, "is damaged", 3)

    with pytest.raises(FedeveError, match=r"source\.bin is damaged: got 3; get the file again"):
        cached("broken", [source], build)
    assert left_in(root) == []


def test_an_interrupt_in_the_build_leaves_nothing(source, root):
    def build(builder: Builder) -> None:
        builder.create("x", (10,), np.uint8)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached("broken", [source], build)
    assert left_in(root) == []


def test_a_failed_rebuild_leaves_no_cache_that_passes_for_the_new_one(source, root):
    numbers = Numbers(source)
    numbers.open()
    source.write_bytes(b"other")

    def build(builder: Builder) -> None:
        raise source_error(source, "is damaged", 3)

    with pytest.raises(FedeveError):
        cached("numbers", [source], build)
    check(numbers.open(), source)
    assert numbers.builds == 2


def test_arrays_stay_valid_while_another_build_replaces_them(source):
    numbers = Numbers(source)
    held = numbers.open().arrays["whole"]
    source.write_bytes(bytes(50))
    numbers.open()
    assert np.array_equal(held, np.arange(100) * 2.0)


PROGRAM = """
import os, resource, sys, time
from pathlib import Path
import numpy as np
from fedeve import FedeveError
from fedeve.data.cache import cached

source, log = Path(sys.argv[1]), Path(sys.argv[2])
LIMITS = {"create": 50_000, "put": 150_000, "spill": 150_000}  # bytes; the array x has 100,000

def build(builder):
    with log.open("a") as file:
        file.write("built\\n")
    x = builder.create("x", (1000, 100), np.uint8)
    for row in range(1000):
        x[row] = row % 256
        if row % 100 == 0 and action == "slow":
            time.sleep(0.05)
    if action == "put":
        builder.put("y", np.zeros(100_000))
    if action == "spill":
        (builder.folder / "spill.bin").write_bytes(bytes(200_000))
    if action == "die":
        os._exit(9)

print("ready", flush=True)
sys.stdin.readline()
for action in sys.argv[3:]:
    if action in LIMITS:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMITS[action], resource.RLIM_INFINITY))
    try:
        opened = cached("shared", [source], build)
    except FedeveError as error:
        print("error", error)
    else:
        print("sum", int(opened.arrays["x"].sum()))
"""


def run(source: Path, log: Path, *actions: str, times: int = 1) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of processes that all ask for the cache at the same moment."""
    command = [sys.executable, "-c", PROGRAM, str(source), str(log), *actions]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(times)]
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60) for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def test_of_processes_that_ask_at_once_one_builds_and_all_get_the_same(source, root, tmp_path):
    total = sum(row % 256 for row in range(1000)) * 100
    done = run(source, tmp_path / "log", "slow", times=3)
    assert [output for _, output, _ in done] == [f"sum {total}\n"] * 3
    assert (tmp_path / "log").read_text() == "built\n"
    assert len(left_in(root)) == 1


def test_a_disk_that_fills_up_while_building_is_a_clear_error_and_leaves_nothing(source, root, tmp_path):
    ((_, output, errors),) = run(source, tmp_path / "log", "create", "put", "spill")
    assert output.count("\n") == 3, errors
    for line in output.splitlines():
        assert line.startswith("error cannot write")
        assert "make room" in line
    assert left_in(root) == []
    check(cached("shared", [source], Numbers(source)), source)


def test_a_build_that_is_killed_leaves_no_cache_and_the_next_one_succeeds(source, root, tmp_path):
    ((status, _, _),) = run(source, tmp_path / "log", "die")
    assert status == 9
    assert all(name.endswith(".part") for name in left_in(root))
    check(cached("shared", [source], Numbers(source)), source)
    assert [name for name in left_in(root) if name.endswith(".part")] == []


def test_a_cache_folder_that_cannot_be_made_is_a_clear_error(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("FEDEVE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(FedeveError, match="cannot write"):
        Numbers(source).open()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 3 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root only")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full_is_an_error_and_leaves_nothing(small_disk: Path, tmp_path: Path) -> None:
    """In a process of its own: writing to a mapping of a file that has no room kills a process outright."""
    source = tmp_path / "source"
    source.write_bytes(b"x")
    code = f"""
from pathlib import Path
from fedeve.data.cache import cached
def build(builder):
    builder.create("x", (8_000_000,), "uint8")[:] = 1
cached("big", [Path({str(source)!r})], build)
"""
    environment = {**os.environ, "FEDEVE_CACHE": str(small_disk)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "No space left on device" in done.stderr.splitlines()[-1], done
    assert [path.name for path in small_disk.iterdir() if path.suffix != ".lock"] == []

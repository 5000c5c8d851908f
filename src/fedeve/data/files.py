"""Files of public data sets: where they are looked for, and what to say when they are not there.

Nothing is downloaded here; loading never downloads. `download.py` does, when asked.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..errors import FedeveError, Words
from ..settings import setting
from .datasets import Dataset


@dataclass(frozen=True)
class Remote:
    """A public file: its name, its address, and its size and checksum where they are known.

    Where `sha256` is None, nobody published one: the first download's is recorded beside the file, and later ones are
    compared with it.
    """

    name: str
    url: str
    size: int | None = None
    sha256: str | None = None
    md5: str | None = None
    """Published by the source; sha256 is what we compute."""
    content_md5: str | None = None
    """Of what a .gz unpacks to: a copy that was compressed again is as good."""


@dataclass(frozen=True, kw_only=True)
class FileDataset(Dataset):
    """A data set that lives in public files below `root`."""

    root: str | None = setting(None, help="folder of the files; FEDEVE_DATA or ~/.cache/fedeve/data unless set")

    remotes: ClassVar[tuple[Remote, ...]] = ()
    homepage: ClassVar[str] = ""

    @property
    def folder(self) -> Path:
        """Where this data set's files are, or are to be put."""
        return data_root(self.root) / self.name

    def find(self, *names: str) -> Path:
        """The first of these files or folders that exists in the root or in a folder of the data set's below it."""
        root = data_root(self.root)
        archives = [remote.name.split(".")[0] for remote in self.remotes]
        for folder in dict.fromkeys([root, self.folder, *(root / archive for archive in archives)]):
            for name in names:
                if (folder / name).exists():
                    return folder / name
        raise FedeveError(
            f"{self.name} is not here",
            got=Words(f"no {' or '.join(names)} below {root}"),
            do=f"run 'fedeve data get {self.name}', or get it from {self.homepage} and put it into {self.folder}",
        )


def data_root(root: str | None = None) -> Path:
    """The folder for data files: the one given, else FEDEVE_DATA, else ~/.cache/fedeve/data."""
    return Path(root or os.environ.get("FEDEVE_DATA") or Path.home() / ".cache" / "fedeve" / "data").expanduser()


def sha256_of(paths: Sequence[Path]) -> str:
    """The checksum of files one after another."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()

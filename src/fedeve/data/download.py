"""Downloads of public files: continued where they stopped, checked, and never half under their own name.

Only a user's request comes here; loading does not. `requests` (extra `data`) speaks HTTP. Beside a file that is being
fetched lie its `.part`, a `.part.json` that says what the part is of, and a `.lock`; later only a `.sha256`, where
nobody published one.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import FedeveError, Words
from ..record import cannot_write, write_atomically
from .files import Remote, sha256_of

if TYPE_CHECKING:
    import requests

BLOCK = 1 << 16
TIMEOUT = (10, 60)  # seconds to connect, seconds of silence


class Step(NamedTuple):
    """How far a file is, in bytes; `state` is waiting, downloading, checking, done, or here (it was before)."""

    name: str
    state: str
    done: int = 0
    total: int | None = None


class Checked(NamedTuple):
    """What a file was found to be, and what that was compared with."""

    size: int
    sha256: str
    compared: str


Progress = Callable[[Step], None]


def get(remote: Remote, folder: Path, *, progress: Progress | None = None) -> Path:
    """The file in this folder, downloaded unless it is there, and checked in either case.

    An interrupted download is continued by the next call. Two calls at once are safe: one fetches, the other waits.
    """
    place, tell = folder / remote.name, progress or (lambda step: None)
    if not place.is_file():
        with _locked(place, lambda: tell(Step(remote.name, "waiting"))):
            if not place.is_file():
                size = _download(remote, place, tell)
                tell(Step(remote.name, "done", size, size))
                return place
    size = verify(remote, place).size
    tell(Step(remote.name, "here", size, size))
    return place


def verify(remote: Remote, path: Path) -> Checked:
    """Compare a file's size and checksum with the published ones, else with that of its first download."""
    if remote.content_md5 and path.stat().st_size != remote.size and _content_md5(path) == remote.content_md5:
        return Checked(path.stat().st_size, sha256_of([path]), "published md5 of its content: compressed again")
    return _verify(remote, path, place=path, do=f"move it away and get it again from {remote.url}")


def _download(remote: Remote, place: Path, tell: Progress) -> int:
    part = _beside(place, ".part")
    advice = f"nothing was kept; try again, or get the file elsewhere and put it into {place.parent}"
    while True:
        continued = _fetch(remote, part, tell)
        size = part.stat().st_size
        tell(Step(remote.name, "checking", size, size))
        try:
            checked = _verify(remote, part, place=place, do=advice)
            break
        except FedeveError:
            _forget(part)
            if not continued:  # else the old bytes may be to blame, and a fresh download is not
                raise
    try:
        with part.open("rb") as file:
            os.fsync(file.fileno())
        if remote.sha256 is None and _recorded(place) is None:
            write_atomically(_beside(place, ".sha256"), f"{checked.sha256}  {place.name}\n".encode())
        os.replace(part, place)
    except OSError as error:
        raise cannot_write(place, error) from error
    _forget(part)
    return checked.size


class _Note(NamedTuple):
    """What a part file is a part of."""

    url: str
    etag: str | None
    modified: str | None
    total: int | None

    @property
    def validator(self) -> str | None:
        """What tells the server which version we have; a weak tag (RFC 9110, 13.1.5) does not."""
        return self.etag if self.etag and not self.etag.startswith("W/") else self.modified


def _fetch(remote: Remote, part: Path, tell: Progress) -> bool:
    """Fill the part file, and say whether bytes of an earlier call are in it."""
    have, old = _kept(remote, part)
    if old is not None and have == old.total:
        return True
    headers = {"Accept-Encoding": "identity"}  # ranges count the bytes of the file, not of a compressed copy
    if old is not None:
        headers |= {"Range": f"bytes={have}-"} | ({"If-Range": old.validator} if old.validator else {})
    with _ask(remote, part.parent, headers) as response:
        continued = old is not None and _continues(response, old, have)
        if not continued and response.status_code == 200:
            have, old = 0, _start(remote, part, response)
        elif not continued and old is not None:
            _forget(part)  # not the file that the part is of: ask for the whole
            return _fetch(remote, part, tell)
        elif old is None:
            raise _refused(remote, part.parent, response)
        _receive(remote, part, response, have=have, total=old.total or remote.size, tell=tell)
    return continued


def _receive(
    remote: Remote, part: Path, response: requests.Response, *, have: int, total: int | None, tell: Progress
) -> None:
    """Append the answer's body to the `have` bytes of the part file."""
    from urllib3.exceptions import HTTPError

    tell(Step(remote.name, "downloading", have, total))
    cause: Exception | None = None
    try:
        with part.open("ab" if have else "wb") as file:
            # The raw stream: some servers call the .gz of a file an encoding, and it would be undone silently.
            for block in response.raw.stream(BLOCK, decode_content=False):
                file.write(block)
                have += len(block)
                tell(Step(remote.name, "downloading", have, total))
    except HTTPError as error:
        cause = error
    except BrokenPipeError:  # not of the file: whoever was told has left
        raise
    except OSError as error:
        raise FedeveError(
            f"cannot write {part}",
            got=Words(error.strerror or str(error)),
            do="make room and run the same again: it goes on where it stopped",
        ) from error
    if cause or (total is not None and have < total):
        raise FedeveError(
            f"the download of {remote.name} stopped",
            got=Words(f"{have} of {'?' if total is None else total} bytes of {remote.url}"),
            do=f"run the same again: it goes on there if the server can; or put the file into {part.parent} yourself",
        ) from cause


def _ask(remote: Remote, folder: Path, headers: dict[str, str]) -> requests.Response:
    """The answer of the server, its body still to be read; 200, 206 or 416."""
    try:
        import requests
    except ImportError:
        raise FedeveError(
            f"cannot download {remote.name}",
            got=Words("no requests"),
            do=f"pip install 'fedeve[data]', or get {remote.url} and put it into {folder}",
        ) from None
    try:
        response = requests.get(remote.url, headers=headers, stream=True, timeout=TIMEOUT)
    except requests.RequestException as error:
        raise _unavailable(remote, folder, _reason(error), "check the network and try again") from error
    page = response.status_code == 200 and response.headers.get("Content-Type", "").startswith("text/html")
    # Where a checksum is known it decides, since some servers call everything a page.
    if response.status_code not in (200, 206, 416) or (page and not (remote.sha256 or remote.md5)):
        response.close()
        raise _refused(remote, folder, response)
    return response


def _start(remote: Remote, part: Path, response: requests.Response) -> _Note:
    """Begin a fresh part file with a note of what is coming, unless that is not what is wanted."""
    headers = response.headers
    length = headers.get("Content-Length", "")
    total = int(length) if length.isdigit() else None
    note = _Note(remote.url, headers.get("ETag"), headers.get("Last-Modified"), total)
    _forget(part)
    if remote.size is not None and total not in (None, remote.size):
        raise FedeveError(
            f"{remote.name} must have {remote.size} bytes",
            got=Words(f"{total} bytes offered by {remote.url}"),
            do=f"nothing was kept; get the file elsewhere and put it into {part.parent}",
        )
    known = remote.size or remote.sha256 or remote.md5
    if total is None and "Transfer-Encoding" not in headers and not known:
        raise _unavailable(remote, part.parent, "an answer that does not say how long it is", "try again later")
    write_atomically(_beside(part, ".json"), json.dumps(note._asdict()).encode())
    return note


def _continues(response: requests.Response, note: _Note, have: int) -> bool:
    """Whether the body is the rest of the very file that the part is of."""
    start, _, total = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
    same = response.headers.get("ETag") in (None, note.etag) and total in ("*", str(note.total))
    return response.status_code == 206 and same and start.partition("-")[0] == str(have)


def _kept(remote: Remote, part: Path) -> tuple[int, _Note | None]:
    """How many bytes an earlier call left, and of what; nothing unless they can be told from another version's."""
    try:
        note = _Note(**json.loads(_beside(part, ".json").read_bytes()))
        have = part.stat().st_size
    except (OSError, ValueError, TypeError):
        return 0, None
    sure = note.validator or remote.sha256 or remote.md5
    fits = note.url == remote.url and note.total is not None and 0 < have <= note.total
    return (have, note) if sure and fits else (0, None)


def _verify(remote: Remote, path: Path, *, place: Path, do: str) -> Checked:
    try:
        size = path.stat().st_size
        if remote.size is not None and size != remote.size:
            raise FedeveError(f"{place} must have {remote.size} bytes", got=Words(f"{size} bytes"), do=do)
        sha256 = sha256_of([path])
        if remote.sha256 is not None:
            _compare(place, "sha256", remote.sha256, sha256, do)
            return Checked(size, sha256, "published sha256")
        if remote.md5 is not None:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
            _compare(place, "md5", remote.md5, digest.hexdigest(), do)
    except OSError as error:
        raise FedeveError(f"cannot read {path}", got=Words(error.strerror or str(error)), do=do) from error
    recorded = _recorded(place)
    if recorded is not None:
        note = _beside(place, ".sha256")
        known = f"if its publisher changed it on purpose, delete {note} and get it again; else {do}"
        _compare(place, "sha256", recorded, sha256, known, source=" as first downloaded")
    if remote.md5 is not None:
        return Checked(size, sha256, "published md5")
    return Checked(size, sha256, "sha256 of the first download" if recorded else "nothing: no checksum is known")


def _content_md5(path: Path) -> str | None:
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with gzip.open(path) as file:
            while block := file.read(BLOCK):
                digest.update(block)
    except (OSError, EOFError, zlib.error):
        return None
    return digest.hexdigest()


def _compare(place: Path, kind: str, expected: str, got: str, do: str, *, source: str = "") -> None:
    if got != expected.lower():
        raise FedeveError(f"{place} must have {kind} {expected}{source}", got=Words(got), do=do)


def _recorded(place: Path) -> str | None:
    """The checksum of the first download, if there was one; the file is as `sha256sum` writes it."""
    try:
        words = _beside(place, ".sha256").read_text().split()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _bad_record(place, str(error)) from error
    if not words or len(words[0]) != 64:
        raise _bad_record(place, " ".join(words))
    return words[0].lower()


def _bad_record(place: Path, got: str) -> FedeveError:
    path = _beside(place, ".sha256")
    return FedeveError(f"{path} must hold a sha256", got=got, do="delete it, and the next download is recorded anew")


def _refused(remote: Remote, folder: Path, response: requests.Response) -> FedeveError:
    """The error for an answer without the file; a page instead of it asks for a login, or apologises."""
    status = response.status_code
    got = "a web page" if status == 200 else f"{status} {response.reason}"
    moved = "its address may have changed, 'fedeve data list' names the publisher's page"
    return _unavailable(remote, folder, got, "try again later" if status == 429 or status >= 500 else moved)


def _unavailable(remote: Remote, folder: Path, got: str, hint: str) -> FedeveError:
    return FedeveError(
        f"cannot download {remote.name}",
        got=Words(got),
        do=f"{hint}, or get {remote.url} elsewhere and put it into {folder}",
    )


def _reason(error: BaseException) -> str:
    """The innermost cause; what libraries wrap around it is long."""
    inner: Any = error
    while inner.__cause__ or inner.__context__:
        inner = inner.__cause__ or inner.__context__
    return f"'{getattr(inner, 'strerror', None) or inner}'"


def _forget(part: Path) -> None:
    """Remove a part file and its note, the part first: a note alone means nothing, a part alone is started anew."""
    for path in (part, _beside(part, ".json")):
        with contextlib.suppress(OSError):
            path.unlink()


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


@contextlib.contextmanager
def _locked(place: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the only right to make this file; says so once if another process has it."""
    lock = _beside(place, ".lock")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        handle = _lock(lock, waiting)
    except OSError as error:
        raise cannot_write(place, error) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()  # before it is released, so that who waits for it sees that it is gone
        os.close(handle)


def _lock(lock: Path, waiting: Callable[[], None]) -> int:
    told = False
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not told:
                    waiting()
                    told = True
                fcntl.flock(handle, fcntl.LOCK_EX)
            if os.fstat(handle).st_nlink:  # else its holder is done and removed it: a newer one counts
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)

"""Downloads are whole, continued where they were cut off, and checked."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from typing import Any

import pytest
from loopback import CONTENT, HALF, OTHER, Served, Server, begin, finish, names, sha256

from fedeve import FedeveError
from fedeve.data import download
from fedeve.data.download import Step
from fedeve.data.files import Remote

# Whole files


def test_a_file_is_downloaded_and_nothing_else_is_left_beside_it(server: Server, tmp_path: Path) -> None:
    remote = server.remote(sha256=sha256(CONTENT).upper(), size=len(CONTENT))
    steps: list[Step] = []
    assert download.get(remote, tmp_path / "new" / "folder", progress=steps.append) == tmp_path / "new/folder/some.bin"
    assert (tmp_path / "new/folder/some.bin").read_bytes() == CONTENT
    assert names(tmp_path / "new/folder") == ["some.bin"]
    assert list(dict.fromkeys(step.state for step in steps)) == ["downloading", "checking", "done"]
    done = [step.done for step in steps]
    assert done == sorted(done) and done[0] == 0 and done[-1] == len(CONTENT)
    assert {step.total for step in steps} == {len(CONTENT)} and len(done) > 10


def test_a_complete_file_causes_no_request(server: Server, tmp_path: Path) -> None:
    remote, steps = server.remote(), []
    for _ in range(3):
        download.get(remote, tmp_path, progress=steps.append)
    assert len(server.log) == 1 and server.log[0].sent == len(CONTENT)
    assert [step.state for step in steps[-2:]] == ["here", "here"]


def test_a_file_put_there_by_hand_is_taken_if_it_is_the_right_one(server: Server, tmp_path: Path) -> None:
    remote = server.remote(sha256=sha256(CONTENT))
    (tmp_path / "some.bin").write_bytes(CONTENT)
    assert download.get(remote, tmp_path) == tmp_path / "some.bin"
    (tmp_path / "some.bin").write_bytes(OTHER)
    with pytest.raises(FedeveError) as refused:
        download.get(remote, tmp_path)
    assert sha256(CONTENT) in str(refused.value) and sha256(OTHER) in str(refused.value)
    assert (tmp_path / "some.bin").read_bytes() == OTHER, "a user's file is not ours to remove"
    assert server.log == []


def test_a_redirect_is_followed_and_a_resumed_one_too(server: Server, tmp_path: Path) -> None:
    target = begin(server, tmp_path)
    moved = server.remote(Served(b"", status=302, headers={"Location": target.url}), name="old.bin")
    remote = Remote("some.bin", moved.url)
    finish(remote, tmp_path)  # the part was of another address, so it is not continued
    assert server.log[-1].sent == len(CONTENT)
    (tmp_path / "some.bin").unlink()
    server.files["/some.bin"].cut = HALF
    with pytest.raises(FedeveError, match="stopped"):
        download.get(remote, tmp_path)
    server.files["/some.bin"].cut = None
    finish(remote, tmp_path)
    assert server.log[-1].sent == len(CONTENT) - HALF


def test_bytes_are_kept_as_they_are_even_if_the_server_calls_them_an_encoding(server: Server, tmp_path: Path) -> None:

    packed = gzip.compress(CONTENT[:1000])
    remote = server.remote(Served(packed, headers={"Content-Encoding": "gzip"}), name="some.gz")
    assert download.get(remote, tmp_path).read_bytes() == packed
    assert server.log[0].headers["Accept-Encoding"] == "identity"


def test_an_empty_file_is_a_file(server: Server, tmp_path: Path) -> None:
    finish(server.remote(Served(b""), size=0, sha256=sha256(b"")), tmp_path, content=b"")


# Resuming


def test_a_cut_off_download_is_continued_and_only_the_rest_is_asked_for(server: Server, tmp_path: Path) -> None:
    remote = begin(server, tmp_path)
    assert (tmp_path / "some.bin.part").read_bytes() == CONTENT[:HALF]
    steps: list[Step] = []
    download.get(remote, tmp_path, progress=steps.append)
    assert (tmp_path / "some.bin").read_bytes() == CONTENT
    (asked,) = server.log
    assert asked.headers["Range"] == f"bytes={HALF}-" and asked.headers["If-Range"] == '"one"'
    assert asked.status == 206 and asked.sent == len(CONTENT) - HALF
    assert steps[0] == Step("some.bin", "downloading", HALF, len(CONTENT))
    assert names(tmp_path) == ["some.bin", "some.bin.sha256"]


def test_a_download_cut_off_many_times_asks_for_every_byte_once(server: Server, tmp_path: Path) -> None:
    remote = server.remote(Served(cut=300_000))
    for _ in range(3):
        with pytest.raises(FedeveError, match="stopped"):
            download.get(remote, tmp_path)
    finish(remote, tmp_path)
    assert [asked.sent for asked in server.log] == [300_000, 300_000, 300_000, 100_003]


@pytest.mark.parametrize(
    ("served", "known", "resumes"),
    [
        (Served(etag=None, modified="Tue, 01 Jul 2025 10:00:00 GMT"), False, True),
        (Served(etag='W/"weak"', modified="Tue, 01 Jul 2025 10:00:00 GMT"), False, True),
        (Served(etag='W/"weak"'), False, False),
        (Served(etag=None), False, False),
        (Served(etag=None), True, True),
        (Served(ranges="no"), True, False),
        (Served(ranges="refuse"), True, False),
        (Served(ranges="refuse"), False, False),
        (Served(ranges="shifted"), True, False),
        (Served(length="chunked"), True, False),
    ],
)
def test_what_cannot_be_continued_safely_starts_afresh(
    server: Server, tmp_path: Path, served: Served, known: bool, resumes: bool
) -> None:
    remote = begin(server, tmp_path, served, **({"sha256": sha256(CONTENT)} if known else {}))
    steps: list[Step] = []
    finish(remote, tmp_path, progress=steps.append)
    assert steps[0].done == (HALF if resumes else 0)
    assert server.log[-1].sent == len(CONTENT) - (HALF if resumes else 0)
    if resumes and served.modified:
        assert server.log[0].headers["If-Range"] == served.modified


@pytest.mark.parametrize(
    ("served", "change", "known", "requests"),
    [
        (Served(), Served(OTHER, etag='"two"'), False, 1),
        (Served(), Served(OTHER, etag='"two"', ranges="blind"), False, 2),
        (Served(etag=None), Served(OTHER[:800_000], etag=None), True, 2),
        (Served(etag=None), Served(OTHER, etag=None), True, 2),
    ],
    ids=["told by If-Range", "told by the tag", "told by the length", "told by the checksum"],
)
def test_a_file_that_changed_in_between_is_fetched_whole(
    server: Server, tmp_path: Path, served: Served, change: Served, known: bool, requests: int
) -> None:
    remote = begin(server, tmp_path, served, sha256=sha256(change.content) if known else None)
    server.files["/some.bin"] = change
    finish(remote, tmp_path, content=change.content)
    assert len(server.log) == requests and server.log[-1].sent == len(change.content)


def test_a_damaged_part_is_fetched_again(server: Server, tmp_path: Path) -> None:
    remote = begin(server, tmp_path, sha256=sha256(CONTENT))
    (tmp_path / "some.bin.part").write_bytes(OTHER[:HALF])
    finish(remote, tmp_path)
    assert [asked.sent for asked in server.log] == [len(CONTENT) - HALF, len(CONTENT)]


def test_a_part_longer_than_the_file_is_fetched_again(server: Server, tmp_path: Path) -> None:
    remote = begin(server, tmp_path)
    (tmp_path / "some.bin.part").write_bytes(CONTENT + b"more")
    finish(remote, tmp_path)


@pytest.mark.parametrize("note", ["", "{", "[]", "{}", '{"url": 1}', '{"more": 1}'])
def test_a_part_with_a_note_that_says_nothing_is_fetched_again(server: Server, tmp_path: Path, note: str) -> None:
    remote = begin(server, tmp_path)
    (tmp_path / "some.bin.part").write_bytes(OTHER)
    (tmp_path / "some.bin.part.json").write_text(note)
    finish(remote, tmp_path)
    assert "Range" not in server.log[0].headers


def test_a_complete_part_needs_no_request(server: Server, tmp_path: Path) -> None:
    remote = begin(server, tmp_path)
    (tmp_path / "some.bin.part").write_bytes(CONTENT)
    finish(remote, tmp_path)
    assert server.log == []


# Checks


def test_a_wrong_checksum_leaves_nothing_and_names_both(server: Server, tmp_path: Path) -> None:
    remote = server.remote(Served(OTHER), sha256=sha256(CONTENT))
    with pytest.raises(FedeveError) as refused:
        download.get(remote, tmp_path)
    assert f"sha256 {sha256(CONTENT)}: got {sha256(OTHER)}" in str(refused.value)
    assert names(tmp_path) == []


def test_a_published_md5_is_checked_and_the_sha256_recorded(server: Server, tmp_path: Path) -> None:
    digest = hashlib.md5(CONTENT).hexdigest()
    remote = server.remote(md5=digest)
    finish(remote, tmp_path)
    assert download.verify(remote, tmp_path / "some.bin").compared == "published md5"
    (tmp_path / "some.bin").unlink()
    server.files["/some.bin"].content = OTHER
    with pytest.raises(FedeveError, match=f"md5 {digest}: got {hashlib.md5(OTHER).hexdigest()}"):
        download.get(remote, tmp_path)
    assert names(tmp_path) == ["some.bin.sha256"]


def test_a_wrong_size_is_refused_before_the_body_is_fetched(server: Server, tmp_path: Path) -> None:
    remote = server.remote(Served(pause=0.05), size=len(CONTENT) + 1)
    with pytest.raises(FedeveError, match=r"must have 1000004 bytes: got 1000003 bytes"):
        download.get(remote, tmp_path)
    assert names(tmp_path) == [] and server.log[0].sent < len(CONTENT)


def test_a_wrong_size_that_was_not_announced_is_refused_afterwards(server: Server, tmp_path: Path) -> None:
    remote = server.remote(Served(length="chunked"), size=len(CONTENT) - 1)
    with pytest.raises(FedeveError, match=r"must have 1000002 bytes: got 1000003 bytes"):
        download.get(remote, tmp_path)
    assert names(tmp_path) == []


def test_without_a_published_checksum_the_first_one_is_recorded_and_compared(server: Server, tmp_path: Path) -> None:
    remote = server.remote()
    finish(remote, tmp_path)
    assert (tmp_path / "some.bin.sha256").read_text() == f"{sha256(CONTENT)}  some.bin\n"
    assert download.verify(remote, tmp_path / "some.bin").compared == "sha256 of the first download"
    (tmp_path / "some.bin").unlink()
    finish(remote, tmp_path)
    (tmp_path / "some.bin").unlink()
    server.files["/some.bin"] = Served(OTHER)
    with pytest.raises(FedeveError) as refused:
        download.get(remote, tmp_path)
    assert sha256(CONTENT) in str(refused.value) and sha256(OTHER) in str(refused.value)
    assert "some.bin.sha256" in refused.value.do and names(tmp_path) == ["some.bin.sha256"]
    (tmp_path / "some.bin.sha256").unlink()
    finish(remote, tmp_path, content=OTHER)


def test_a_damaged_record_of_the_checksum_is_an_error(server: Server, tmp_path: Path) -> None:
    (tmp_path / "some.bin.sha256").write_text("what is this\n")
    with pytest.raises(FedeveError, match=r"some.bin.sha256 must hold a sha256"):
        download.get(server.remote(), tmp_path)


@pytest.mark.parametrize("known", [{}, {"size": len(CONTENT)}, {"sha256": sha256(CONTENT)}])
def test_an_answer_of_unknown_length_is_taken_only_if_its_end_can_be_told(
    server: Server, tmp_path: Path, known: dict[str, Any]
) -> None:
    remote = server.remote(Served(length="unknown", cut=HALF), **known)
    with pytest.raises(FedeveError, match="stopped" if "size" in known else None):
        download.get(remote, tmp_path)
    assert not (tmp_path / "some.bin").exists()
    server.files["/some.bin"].cut = None
    if known:
        finish(remote, tmp_path)
    else:
        with pytest.raises(FedeveError, match="does not say how long it is"):
            download.get(remote, tmp_path)

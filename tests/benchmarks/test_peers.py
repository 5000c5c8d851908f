"""Beside other simulators: everybody has the same network, data and start, and nobody's failure is hidden."""

from __future__ import annotations

import argparse
from pathlib import Path

import peers
import pytest
import torch
from peers import BARE, CONTESTANTS, Contestant, UnableError, compete, install, play, table, write_work
from work import LeNet5, Work

from fedeve import FedAvg, Run, datasets, models


@pytest.fixture(scope="module")
def small_work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("work") / "work.npz"
    write_work(path, num_clients=12, images_each=30)
    return path


def test_the_peers_network_is_our_lenet5() -> None:
    torch.manual_seed(1)
    ours = models.create("lenet5", (28, 28), 62)
    theirs = LeNet5(62)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(5, 28, 28)
    assert torch.equal(theirs(x), ours(x))


def test_the_peers_read_the_clients_and_the_start_that_we_simulate(small_work: Path) -> None:
    data = datasets.load("glyphs", num_writers=12, num_images=360, partition="iid")
    work = Work.read(small_work)
    assert len(work.clients) == 12 and (work.cohort, work.batch, work.lr) == (10, 20, 0.1)
    for client, (x, y) in enumerate(work.clients):
        rows = data.rows(client)
        assert torch.equal(x, data.inputs(data.x[rows])) and torch.equal(y, torch.from_numpy(data.y[rows]))
    assert torch.equal(work.x_test, data.inputs(data.x_test)) and len(work.y_test) == 36
    start = Run(method=FedAvg(), data=data, rounds=1).build_model().state_dict()
    assert all(torch.equal(work.model().state_dict()[name], value) for name, value in start.items())


def test_contestants_take_turns_and_one_that_fails_is_listed_with_the_reason(small_work: Path) -> None:
    broken = Contestant("broken", "no_such_script.py")
    chosen = [c for c in CONTESTANTS if c.name in (BARE, "fedeve, reference")]
    told = argparse.Namespace(repeats=2, rounds=2, warm_up=1)
    result = compete([broken, *chosen], small_work, told)
    rows = result["contestants"]
    assert list(rows) == ["broken", BARE, "fedeve, reference"]
    assert "no_such_script.py" in rows["broken"]["unable"]
    assert rows[BARE]["times_bare"] == 1.0 and len(rows[BARE]["every_turn"]) == 2
    ours = rows["fedeve, reference"]
    assert ours["rounds_per_second"] > 0 and ours["versions"]["torch"] == torch.__version__
    assert 0 <= min(ours["accuracy"]) <= max(ours["accuracy"]) <= 1
    text = table(result)
    assert "| broken" in text and f"broken: {rows['broken']['unable']}" in text


def test_a_contestant_that_takes_too_long_is_stopped(small_work: Path) -> None:
    python = Path(peers.sys.executable)
    with pytest.raises(UnableError, match="not done after"):
        play(CONTESTANTS[0], python, small_work, rounds=1, warm_up=0, limit=0.2)


def test_a_peer_that_cannot_be_installed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    for name in ("PIP_NO_INDEX", "PIP_ISOLATED"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UnableError, match=r"not installed: .*No matching distribution found for torch"):
        install("pfl")
    assert not (tmp_path / ".venv-peers-pfl" / ".ready").exists()


@pytest.mark.slow
@pytest.mark.parametrize("contestant", [c for c in CONTESTANTS if c.peer], ids=lambda c: c.name)
def test_the_other_simulators_play_the_common_work(contestant: Contestant, small_work: Path) -> None:
    environment = peers.ROOT / f".venv-peers-{contestant.peer}"
    if not (environment / ".ready").exists():
        pytest.skip(f"no {environment.name}: make bench-peers installs it")
    got = play(contestant, environment / "bin" / "python", small_work, rounds=2, warm_up=1, limit=120)
    assert got["rounds_per_second"] > 0 and 0 <= got["accuracy"] <= 1
    assert got["versions"]["torch"] == torch.__version__

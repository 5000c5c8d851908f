"""The command line as a user meets it: real processes, real files, real errors."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commandline import in_process
from fedeve import Record, __version__, all_methods
from fedeve.data.datasets import all_datasets

CONFIG = """
rounds = 6
cohort = 5
model = "linear"
eval_every = 2
[method]
name = "fedeve"
[data]
name = "digits"
num_clients = 30
[local]
lr = 0.1
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return path


def fedeve(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedeve", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)  # type: ignore[call-overload,no-any-return]


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """One line on stderr with these words, exit code 2."""
    assert done.returncode == 2, done
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_leaves_a_record_and_a_checkpoint(config: Path, tmp_path: Path) -> None:
    done = fedeve("run", config, "--out", tmp_path / "out", "--set", "local.lr=0.05", "--seed", 3, "--rounds", 4)
    assert done.returncode == 0, done.stderr
    record = Record.read(tmp_path / "out" / "record.jsonl")
    assert record.evaluated.tolist() == [2, 4]
    assert record.header["config"]["local"]["lr"] == 0.05 and record.header["seed"] == 3
    assert sorted(os.listdir(tmp_path / "out")) == [".lock", "checkpoint.safetensors", "record.jsonl"]
    assert "round 2/4  accuracy" in done.stdout and "gain" in done.stdout


def test_a_profile_says_where_the_time_went(config: Path, tmp_path: Path) -> None:
    done = fedeve("run", config, "--out", tmp_path / "out", "--profile", "--width", "1")
    assert done.returncode == 0, done.stderr
    assert "client-steps in" in done.stdout and "lanes 100 % full" in done.stdout
    again = fedeve("run", config, "--out", tmp_path / "again", "--profile", "--json")
    told = next(line for line in map(json.loads, again.stdout.splitlines()) if "profile" in line)["profile"]
    assert set(told["stages"]) == {"training", "server", "evaluation"} and told["client_steps"] > 0


def test_json_is_for_machines(config: Path, tmp_path: Path) -> None:
    done = fedeve("run", config, "--out", tmp_path / "out", "--json")
    lines = [json.loads(text) for text in done.stdout.splitlines()]
    assert [line["round"] for line in lines[:-1]] == [2, 4, 6]
    assert lines[-1]["done"] and 0 < lines[-1]["final"]["accuracy"] <= 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("method.name=fedevee", ["unknown method", "'fedevee'", "did you mean 'fedeve'?"]),
        ("local.lrr=0.1", ["'local.lrr'", "did you mean 'lr'?"]),
        ("roundz=3", ["'roundz'", "did you mean 'rounds'?"]),
        ("method.server_rl=1", ["'method.server_rl'", "did you mean 'server_lr'?"]),
        ("data.alpa=1", ["'data.alpa'", "did you mean 'alpha'?"]),
        ("data.name=digit", ["unknown data set", "did you mean 'digits'?"]),
        ("model=lenet", ["unknown model", "did you mean 'lenet5'?"]),
        ("local.lr=-0.1", ["local.lr must be above 0", "-0.1"]),
        ("method.server_lr=-1", ["method.server_lr must be above 0", "-1"]),
        ("cohort=31", ["cohort is larger than the", "31", "set cohort to at most"]),
        ("local.lr=fast", ["local.lr must be a number", "'fast'"]),
        ("rounds=2.5", ["rounds must be a whole number", "2.5"]),
        ("rounds=nan", ["rounds must be a whole number"]),
        ("local.lr=inf", ["local.lr must be finite"]),
        ("local.batch=true", ["local.batch must be a whole number", "True"]),
        ("method=3", ["method must be a table", "3"]),
        ("local", ["cannot set this", "'local'", "KEY=VALUE"]),
        ("rounds.x=1", ["rounds is not a table"]),
        ("model=lenet5", ["this model wants images", "(8, 8)"]),
        ("data.partition=natural", ["data.partition", "'natural'"]),
    ],
)
def test_bad_settings_are_refused_in_one_line(config: Path, tmp_path: Path, change: str, words: list[str]) -> None:
    assert_refused(in_process("run", config, "--out", tmp_path / "out", "--set", change), *words)
    assert not (tmp_path / "out" / "record.jsonl").exists()


def test_a_missing_configuration_is_refused(tmp_path: Path) -> None:
    assert_refused(fedeve("run", tmp_path / "no.toml", "--out", tmp_path / "out"), "no.toml", "check the path")


@pytest.mark.parametrize("content", ["rounds = = 3", "rounds = 3\nrounds = 4", "[local\n"])
def test_broken_toml_is_refused_with_the_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(content)
    assert_refused(in_process("run", path, "--out", tmp_path / "out"), "is not valid TOML", "line")


def test_a_binary_configuration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    assert_refused(in_process("run", path, "--out", tmp_path / "out"), "is not text")


def test_command_line_mistakes_are_one_line_too(config: Path) -> None:
    assert_refused(fedeve("rum"), "No such command")
    assert_refused(fedeve("run", config), "--out")
    assert_refused(fedeve("demo", "--rounds", "0"), "--rounds")


def test_debug_shows_the_traceback_wherever_it_stands(config: Path, tmp_path: Path) -> None:
    command = ["run", config, "--out", tmp_path, "--set", "rounds=x"]
    for arguments in (["--debug", *command], [*command, "--debug"]):
        done = fedeve(*arguments)
        assert done.returncode == 1 and "Traceback" in done.stderr and "FedeveError" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--engine", "foo"), "unknown engine"),
        (("--device", "tpu"), "this device cannot be used"),
        (("--precision", "fp8"), "unknown precision"),
        (("--set", "cohort=1000"), "cohort is larger"),
        (("--set", "model=lenet5"), "wants images"),
        (("--width", "1000000000"), "--width"),
        (("--threads", "100000"), "--threads"),
        (("--checkpoint-every", "nan"), "nan is not a number"),
    ],
)
def test_a_refused_run_leaves_nothing_behind(
    config: Path, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    assert_refused(in_process("run", config, "--out", tmp_path / "new" / "out", *options), words)
    assert list(tmp_path.iterdir()) == [config]


def test_lanes_that_the_machine_has_no_room_for_are_refused_in_one_line(config: Path, tmp_path: Path) -> None:
    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    done = fedeve("run", config, "--out", tmp_path / "out", "--width", 100, preexec_fn=few_files)
    assert_refused(done, "no room for so many lanes", "100", "set a smaller width")


def test_an_empty_configuration_and_an_empty_folder_name_are_refused(config: Path, tmp_path: Path) -> None:
    for out in (("--out", ""), ("--out=",)):
        assert_refused(in_process("run", config, *out), "--out has no folder")
    (tmp_path / "empty.toml").write_text("# nothing\n")
    assert_refused(in_process("run", tmp_path / "empty.toml", "--out", tmp_path / "out"), "says nothing", "empty.toml")
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_cannot_be_made_is_refused(config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here already")
    assert_refused(fedeve("run", config, "--out", tmp_path / "file" / "out"), "cannot write", "Not a directory")
    assert (tmp_path / "file").read_text() == "here already"


def test_a_read_only_output_folder_is_refused(config: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        folder = Path("/sys")  # root may write anywhere else
    else:
        folder = tmp_path / "locked"
        folder.mkdir(mode=0o555)
    assert_refused(fedeve("run", config, "--out", folder / "out"), "cannot write", "choose another folder")


def test_resuming_nothing_is_refused(tmp_path: Path) -> None:
    assert_refused(fedeve("resume", tmp_path), "no run to resume", "fedeve run")


def test_a_damaged_checkpoint_is_refused_and_left_alone(config: Path, tmp_path: Path) -> None:
    fedeve("run", config, "--out", tmp_path / "out")
    path = tmp_path / "out" / "checkpoint.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-5] ^= 1
    path.write_bytes(damaged)
    assert_refused(fedeve("resume", tmp_path / "out"), "is damaged", "checksum")
    assert path.read_bytes() == damaged


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))


def test_a_disk_that_fills_up_leaves_whole_files_and_a_run_to_resume(config: Path, tmp_path: Path) -> None:
    """Writes beyond 5,000 bytes fail, as on a full disk; the record grows into that."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    changes = ("--set", "eval_every=1", "--rounds", 100, "--checkpoint-every", 0, "--set", "data.num_clients=20")
    changes = (*changes, "--set", "watch_drift=false")  # else the checkpoint is the first to be too large
    assert fedeve("run", config, "--out", whole, *changes, "--set", "method=fedavg").returncode == 0
    full = fedeve("run", config, "--out", parts, *changes, "--set", "method=fedavg", preexec_fn=limit_file_size)
    assert_refused(full, "cannot write", "File too large", "make room")
    assert not list(parts.glob("*.part"))
    assert (parts / "record.jsonl").read_bytes().endswith(b"\n") and (whole / "record.jsonl").stat().st_size > 5000
    assert fedeve("resume", parts).returncode == 0
    assert (whole / "record.jsonl").read_bytes() == (parts / "record.jsonl").read_bytes()


def test_a_checkpoint_that_does_not_fit_leaves_nothing_behind(config: Path, tmp_path: Path) -> None:
    full = fedeve("run", config, "--out", tmp_path / "out", "--checkpoint-every", 0, preexec_fn=limit_file_size)
    assert_refused(full, "cannot write", "checkpoint.safetensors")
    assert sorted(os.listdir(tmp_path / "out")) == [".lock", "record.jsonl"]
    assert fedeve("resume", tmp_path / "out").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_at_once_and_says_how_to_go_on(config: Path, tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "fedeve", "run", str(config), "--out", str(out), "--rounds", "100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "round" not in process.stdout.readline():
        assert process.poll() is None
    started = time.monotonic()
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and f"fedeve resume {out}" in errors
    assert time.monotonic() - started < 5
    assert (out / "checkpoint.safetensors").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_while_it_prepares_a_run_says_so_in_one_line_and_leaves_nothing(
    config: Path, tmp_path: Path, number: signal.Signals
) -> None:
    many = ("--set", 'data={name="glyphs",num_writers=3000,num_images=600000}')
    command = [sys.executable, "-m", "fedeve", "run", str(config), "--out", str(tmp_path / "new" / "out"), *many]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline().startswith("Preparing glyphs")
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and errors == "fedeve: stopped\n"
    assert list(tmp_path.iterdir()) == [config]


@pytest.mark.parametrize("command", ["run", "report", "pack"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_while_it_imports_says_so_in_one_line(tmp_path: Path, command: str, number: signal.Signals) -> None:
    """A real signal, sent when a command begins to import what it needs."""
    code = (
        "import os, sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        name in ('torch', 'fedeve.record') and os.kill(os.getpid(), {int(number)})\n"
        f"sys.argv = ['fedeve', '{command}', '{tmp_path}', '--out', '{tmp_path / 'out.html'}']\n"
        "from fedeve.cli import main\n"
        "sys.meta_path.insert(0, Stop())\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "fedeve: stopped\n")
    assert not list(tmp_path.iterdir())


def test_a_reader_who_goes_away_ends_a_run_without_a_word(config: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedeve", "run", str(config), "--out", str(tmp_path / "out"), "--rounds", "5000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert (process.stderr.read(), process.wait(timeout=60)) == ("", 141)
    process.stderr.close()
    assert (tmp_path / "out" / "checkpoint.safetensors").exists()


def test_a_terminal_gets_one_live_line(config: Path, tmp_path: Path) -> None:
    """In a real pseudo-terminal the rounds are drawn over each other instead of listed."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "fedeve", "run", str(config), "--out", str(tmp_path / "out"), "--rounds", "300"]
    process = subprocess.Popen(
        command, stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    )
    os.close(slave)
    shown = b""
    while process.poll() is None or select.select([master], [], [], 0.2)[0]:
        try:
            shown += os.read(master, 65536)
        except OSError:  # the other end is closed
            break
    text = shown.decode()
    assert process.wait() == 0
    assert "300/300" in text and "accuracy" in text and "gain" in text and "rounds/s" in text
    assert "\x1b[" in text and text.count("round 2/300") == 0


def test_methods_and_data_sets_are_listed() -> None:
    shown = in_process("methods").stdout
    assert all(f"{name}: " in shown for name in all_methods())
    assert set(json.loads(in_process("methods", "--json").stdout)) == set(all_methods())
    shown = in_process("data", "list").stdout
    assert all(name in shown for name in all_datasets())
    assert set(json.loads(in_process("data", "list", "--json").stdout)) == set(all_datasets())


def test_version_and_citation_are_told() -> None:
    assert fedeve("--version").stdout == f"fedeve {__version__}\n"
    assert fedeve("cite").stdout.startswith("@misc{shen2025fedeve")


@pytest.mark.parametrize(
    "command",
    [
        (),
        ("demo",),
        ("run",),
        ("resume",),
        ("methods",),
        ("data", "list"),
        ("data", "get"),
        ("data", "check"),
        ("pack",),
        ("cite",),
    ],
)
def test_every_help_text_ends_in_an_example(command: tuple[str, ...]) -> None:
    done = in_process(*command, "--help")
    assert done.returncode == 0
    assert "Usage:" in done.stdout and "\\" not in done.stdout
    if command:
        assert f"Example: fedeve {' '.join(command)}" in done.stdout


def test_a_command_that_there_is_not_is_guessed_once_and_the_right_help_is_named() -> None:
    said = in_process("paper", "tabel1").stderr
    assert said.count("Did you mean") == 1 and "'table1'" in said and said.endswith("See 'fedeve paper --help'.\n")
    said = in_process("repotr").stderr
    assert said == "fedeve: No such command 'repotr'. Did you mean 'report'? See 'fedeve --help'.\n"
    said = in_process("run", "--outt", "x").stderr
    assert said.count("Did you mean") == 1 and "'--out'" in said and said.endswith("See 'fedeve run --help'.\n")


@pytest.mark.parametrize("group", [(), ("paper",), ("data",), ("drift",)])
def test_a_group_without_a_command_prints_its_help_on_stdout(group: tuple[str, ...]) -> None:
    done = in_process(*group)
    assert done.stdout.startswith(f"Usage: {' '.join(['fedeve', *group])} ") and done.stderr == ""
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("run",), "A TOML file, or a preset"),
        (("resume",), "The folder of an unfinished run"),
        (("sweep",), "What to vary"),
        (("report",), "Folders with records"),
        (("pack",), "Sweeps, or folders with sweeps"),
        (("drift", "inspect"), "A data set's name"),
        (("data", "get"), "A data set."),
    ],
)
def test_help_says_what_an_argument_is(command: tuple[str, ...], words: str) -> None:
    assert in_process(*command, "--help").stdout.count(words) == 1


def test_what_the_readme_shows_of_runs_is_so() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert all("--out" in line for line in re.findall(r"fedeve run [^`\n]*", readme))
    command, answer = re.findall(r"^\$ fedeve (.*)\n(fedeve: .*\n)", readme, re.M)[0]
    assert in_process(*command.split()).stderr == answer


def test_help_does_not_wait_for_pytorch() -> None:
    code = "import sys, fedeve.cli; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"

"""The command line on the day when something is wrong: one line that says what, and an exit code that can be trusted.

Paths and exit codes are tried in this process, where an error that nobody caught fails the test as well; pipes,
signals, permissions and full disks in processes of their own.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.utils._pytree import tree_flatten

import shardstep
from shardstep import ZeroRedundancyOptimizer, checkpoint
from shardstep.state.plain import MARK
from shardstep.tools import cli
from tests.harness import run_ranks

pytestmark = pytest.mark.programs

WIDTH = 5
EXTRA = {
    "epoch": 4,
    "losses": [0.5, 0.25],
    "nothing": {},
    "scheduler": {"base_lrs": [0.1], "last_epoch": 3, "by_number": {1: "one"}},
    "pairs": [(1, "a"), (2, "b")],
    "random": (3, tuple(range(625)), None),
    "noise": torch.arange(2.0),
    "in_a_tuple": (torch.arange(3.0), "beside"),
    "in_a_list": [torch.ones(2), "beside"],
    "text": "words " * 50,
    "infinite": float("inf"),
}


def trained() -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.fixture
def place(tmp_path) -> Path:
    """A directory with everything that a command could be given: right and wrong."""
    model, optimizer = trained()
    for name in ("step-b", "step-a"):  # the newest is not the last by name
        checkpoint.save(tmp_path / "run" / name, optimizer, model)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("text")
    os.mkfifo(tmp_path / "fifo")
    return tmp_path


def save_with_dcp(form: dict[str, Any], directory: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that this process is alone; it would be on standard error, too
        dcp.save(form, checkpoint_id=directory)


def everything_in(directory: Path) -> dict[str, float]:
    return {str(path): path.lstat().st_mtime for path in directory.rglob("*") if not path.is_dir()}


def the_line(captured: str) -> str:
    assert captured.endswith("\n")
    (line,) = captured.splitlines()
    assert line.startswith("shardstep: ")
    return line


SOURCES = {
    "missing": "does not exist",
    "text.txt": "is a file",
    "text.txt/below": "text.txt to be a directory but it is a file",
    "empty": "holds no checkpoint",
    "full": "holds no checkpoint",
    "run": "the newest is {place}/run/step-a",
    "run/step-a/.metadata": "Pass its directory, {place}/run/step-a.",
}
CONVERSIONS = {
    ("missing", "out.pt"): "missing does not exist",
    ("empty", "out.pt"): "empty holds no checkpoint",
    ("run", "out.pt"): "the newest is {place}/run/step-a",
    ("fifo", "new"): "fifo is neither",
    ("text.txt/below", "new"): "it is a file",
    ("run/step-a", "nowhere/out.pt"): "nowhere does not exist. Make it: mkdir -p {place}/nowhere",
    ("run/step-a", "text.txt/out.pt"): "text.txt is a file",
    ("run/step-a", "text.txt/deep/out.pt"): "text.txt to be a directory but it is a file",
    ("run/step-a", "empty"): "empty is a directory. Pass the name of a file, such as {place}/empty/optimizer.pt.",
    ("run/step-a", "fifo"): "no ordinary file",
    ("run/step-a", "."): "is a directory",
    ("optimizer.pt", "nowhere/new"): "nowhere does not exist. Make it: mkdir -p {place}/nowhere",
    ("optimizer.pt", "text.txt/new"): "text.txt is a file",
    ("optimizer.pt", "text.txt"): "text.txt is a file",
    ("optimizer.pt", "full"): "full is something else",
}


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_wrong_path_is_told_in_one_line(command, source, place, capsys) -> None:
    assert cli.main([command, str(place / source)]) == 2
    captured = capsys.readouterr()
    assert SOURCES[source].format(place=place) in the_line(captured.err)
    assert captured.out == ""


@pytest.mark.parametrize(("source", "target"), CONVERSIONS)
def test_a_conversion_that_cannot_be_is_told_in_one_line_and_leaves_nothing(source, target, place, capsys) -> None:
    before = everything_in(place)
    assert cli.main(["convert", str(place / source), str(place / target)]) == 2
    captured = capsys.readouterr()
    assert CONVERSIONS[source, target].format(place=place) in the_line(captured.err)
    assert captured.out == ""
    assert everything_in(place) == before
    assert not (place / "nowhere").exists()


def test_a_relative_path_is_told_as_it_was_typed(place, capsys, monkeypatch) -> None:
    monkeypatch.chdir(place)
    assert cli.main(["inspect", "run"]) == 2
    assert "the newest is run/step-a" in the_line(capsys.readouterr().err)
    assert cli.main(["convert", "run/step-a", "out.pt"]) == 0
    assert capsys.readouterr().out == "run/step-a -> out.pt\n"


def test_of_checkpoints_that_dcp_wrote_the_youngest_is_suggested(tmp_path, capsys) -> None:
    for age, name in enumerate(("b", "c", "a")):
        save_with_dcp({"x": torch.ones(2)}, tmp_path / name)
        os.utime(tmp_path / name / ".metadata", (1e9 - age, 1e9 - age))
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert f"the newest is {tmp_path / 'b'}" in the_line(capsys.readouterr().err)


@pytest.mark.parametrize("command", ["inspect", "verify", "convert"])
@pytest.mark.parametrize("lost", [".metadata", "__0_0.distcp"])
def test_a_checkpoint_that_lacks_a_file_is_damaged_not_a_wrong_path(command, lost, place, capsys) -> None:
    (place / "run" / "step-a" / lost).unlink()
    arguments = [command, str(place / "run" / "step-a")] + ([str(place / "out.pt")] if command == "convert" else [])
    assert cli.main(arguments) == 1
    assert lost in the_line(capsys.readouterr().err)


# --- processes of their own ---------------------------------------------------------------------------------------

SHARDSTEP = [sys.executable, "-m", "shardstep.tools.cli"]
MANY = """
import json, sys
from shardstep.tools.cli import main
for arguments in json.loads(sys.argv[1]):
    print(main(arguments), end=" ", flush=True)
"""
# Root may read and write everything, unless it gives that up.
BOUND = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]


def bound_by_permissions() -> list[str]:
    """What to put before a command so that permissions count for it."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None or subprocess.run([*BOUND, "true"], capture_output=True).returncode != 0:
        pytest.skip("permissions do not count for root, and there is no setpriv to give that up")
    return BOUND


def test_what_may_not_be_read_or_written_is_told_in_one_line(place) -> None:
    locked, unreadable, unlisted = place / "locked", place / "run" / "step-a", place / "run" / "step-b"
    locked.mkdir()
    (locked / "inside").mkdir()
    file, private = unreadable / "__0_0.distcp", place / "private.pt"
    shutil.copy(place / "optimizer.pt", private)
    shutil.copytree(unreadable, place / "good")
    good = str(place / "good")
    expected = {
        ("inspect", str(unreadable)): f"{file} cannot be read",
        ("verify", str(unreadable)): f"{file} cannot be read",
        ("convert", str(unreadable), str(place / "out.pt")): f"{file} cannot be read",
        ("inspect", str(unlisted)): f"{unlisted} cannot be read",
        ("verify", str(unlisted)): f"{unlisted} cannot be read",
        ("convert", str(unlisted), str(place / "out.pt")): f"{unlisted} cannot be read",
        ("convert", str(private), str(place / "new")): f"{private} cannot be read",
        ("convert", good, str(locked / "out.pt")): f"{locked} is not writable",
        ("convert", str(place / "optimizer.pt"), str(locked / "new")): f"{locked} is not writable",
        ("inspect", str(unlisted / "below" / "it")): "cannot be reached",
    }
    modes = {file: 0, unlisted: 0, private: 0, locked: 0o555}
    for path, mode in modes.items():
        path.chmod(mode)
    try:
        command = [*bound_by_permissions(), sys.executable, "-c", MANY, json.dumps(list(expected))]
        done = subprocess.run(command, capture_output=True, text=True)
    finally:
        for path in modes:
            path.chmod(0o755)
    lines = done.stderr.splitlines()
    assert len(lines) == len(expected), done.stderr
    for line, told in zip(lines, expected.values(), strict=True):
        assert line.startswith("shardstep: ")
        assert told in line
    assert done.stdout.split() == ["2"] * len(expected)
    assert not list(place.rglob("*.converting")) + list(place.rglob("*.saving")) + list(place.glob("out.pt"))
    assert not (place / "new").exists()


def test_a_full_disk_is_told_in_one_line_and_leaves_nothing(place) -> None:
    """A limit on the size of a file stands for the disk: the same call of the system fails."""
    param = torch.nn.Parameter(torch.zeros(300_000))
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    param.grad = torch.ones(300_000)
    optimizer.step()
    checkpoint.save(place / "large", optimizer)
    torch.save(optimizer.state_dict(), place / "large.pt")
    commands = [
        ["convert", str(place / "large"), str(place / "out.pt")],
        ["convert", str(place / "large.pt"), str(place / "new")],
    ]
    before = everything_in(place)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))

    done = subprocess.run(
        [sys.executable, "-c", MANY, json.dumps(commands)], capture_output=True, text=True, preexec_fn=limit
    )
    assert done.stdout.split() == ["2", "2"], done.stderr
    for line, name in zip(done.stderr.splitlines(), ("out.pt", "new"), strict=True):
        assert line.startswith(f"shardstep: {place / name}: File too large")
    assert everything_in(place) == before
    assert not list(place.glob(".*"))


def buffered() -> dict[str, str]:
    """An environment in which output fails late, as it does for people."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}


WITHOUT_RICH = (
    "import sys; sys.modules['rich'] = None; from shardstep.tools.cli import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.mark.parametrize(
    "program",
    [
        [*SHARDSTEP, "inspect", "DIR"],
        [*SHARDSTEP, "inspect", "DIR", "--json"],
        [*SHARDSTEP, "--help"],
        [sys.executable, "-c", WITHOUT_RICH, "inspect", "DIR"],
    ],
    ids=["table", "json", "help", "without-rich"],
)
def test_a_pipe_that_is_closed_is_no_reason_to_complain(program, place) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [str(place / "run" / "step-a") if word == "DIR" else word for word in program]
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=buffered())
    finally:
        os.close(writing)
    assert done.stderr == ""
    assert done.returncode == 141


def test_output_that_cannot_be_written_is_told_in_one_line(place) -> None:
    command = [*SHARDSTEP, "verify", str(place / "run" / "step-a")]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=buffered())
    assert "No space left" in the_line(done.stderr)
    assert done.returncode == 2


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it
from shardstep.tools import cli
from shardstep.checkpoint.storage import reader
def interrupted(*args):
    os.kill(os.getpid(), signal.SIGINT)
for owner, name in ((reader._OpenFile, "read_whole"), (os, "fsync")):
    setattr(owner, name, interrupted)
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("source", "target"), [("run/step-a", "out.pt"), ("optimizer.pt", "new")])
def test_control_c_is_quiet_and_leaves_nothing(source, target, place) -> None:
    """The signal comes while DCP reads, or while the new checkpoint is flushed."""
    before = everything_in(place)
    command = [sys.executable, "-c", INTERRUPTED, "convert", str(place / source), str(place / target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert the_line(done.stderr) == "shardstep: interrupted."
    assert done.returncode == 130
    assert everything_in(place) == before
    assert not list(place.glob(".*"))


def test_version() -> None:
    done = subprocess.run([*SHARDSTEP, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"shardstep {shardstep.__version__}\n", "")


# --- what is shown ------------------------------------------------------------------------------------------------


@pytest.fixture
def with_extra(tmp_path) -> Path:
    model, optimizer = trained()
    checkpoint.save(tmp_path / "extra", optimizer, model, EXTRA)
    return tmp_path / "extra"


def test_inspect_tells_every_value_of_extra(with_extra, capsys) -> None:
    assert cli.main(["inspect", str(with_extra), "--json"]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    entries = {entry["key"]: entry for entry in json.loads(capsys.readouterr().out, parse_constant=refuse)["entries"]}
    values = {key: entry["value"] for key, entry in entries.items() if entry["kind"] == "value"}
    assert {key: value for key, value in values.items() if key.startswith("extra.")} == {
        "extra.epoch": 4,
        "extra.losses": [0.5, 0.25],
        "extra.nothing": {},
        "extra.scheduler": {"base_lrs": [0.1], "last_epoch": 3, "by_number": {"1": "one"}},
        "extra.pairs": [[1, "a"], [2, "b"]],
        "extra.random": [3, list(range(625)), None],
        "extra.in_a_tuple": ["tensor([0., 1., 2.])", "beside"],
        "extra.in_a_list.1": "beside",
        "extra.text": "words " * 50,
        "extra.infinite": "inf",
    }
    assert entries["extra.scheduler"]["dtype"] == "dict"
    assert entries["extra.noise"]["shape"] == [2]
    assert values["optim.param_groups.0.betas"] == [0.9, 0.999]


@pytest.mark.parametrize("hidden", [None, "rich"])
def test_inspect_shows_the_beginning_of_long_values(hidden, with_extra, capsys, monkeypatch) -> None:
    if hidden:
        monkeypatch.setitem(sys.modules, hidden, None)
    assert cli.main(["inspect", str(with_extra)]) == 0
    rows = {key: row for row in capsys.readouterr().out.splitlines() for key in row.split() if "extra." in key}
    assert "[0.5, 0.25]" in rows["extra.losses"]
    assert "{}" in rows["extra.nothing"]
    assert "{'base_lrs': [0.1]" in rows["extra.scheduler"]
    assert "(3, (0, 1, 2," in rows["extra.random"]
    assert "…" in rows["extra.text"]
    assert max(map(len, rows.values())) <= 160


def test_inspect_shows_the_rest_of_a_checkpoint_with_something_that_only_code_could_read(tmp_path, capsys) -> None:
    save_with_dcp({"app": {"path": Path("x"), "step": 7}}, tmp_path / "dcp")
    assert cli.main(["inspect", str(tmp_path / "dcp"), "--json"]) == 0
    values = {entry["key"]: entry["value"] for entry in json.loads(capsys.readouterr().out)["entries"]}
    assert values == {"app.path": "(not plain data)", "app.step": 7}


def read_json(capsys) -> dict[str, Any]:
    captured = capsys.readouterr().out
    assert len(captured.splitlines()) == 1
    return json.loads(captured)


def test_every_command_answers_with_one_json_object(place, capsys) -> None:
    directory, file, back = str(place / "run" / "step-a"), str(place / "out.pt"), str(place / "back")
    data = (place / "run" / "step-a" / "__0_0.distcp").stat().st_size
    assert cli.main(["verify", directory, "--json"]) == 0
    assert read_json(capsys) == {"directory": directory, "ok": True, "bytes": data, "problems": []}
    assert cli.main(["convert", directory, file, "--json"]) == 0
    size = (place / "out.pt").stat().st_size
    assert read_json(capsys) == {"source": directory, "target": file, "key": "optim", "bytes": size}
    assert cli.main(["convert", file, back, "--json"]) == 0
    size = (place / "back" / "__0_0.distcp").stat().st_size
    assert read_json(capsys) == {"source": file, "target": back, "key": ".", "bytes": size}
    assert cli.main(["inspect", back, "--json"]) == 0
    assert read_json(capsys)["steps"] == [3.0]


def test_with_json_what_failed_is_json_too(place, capsys) -> None:
    for arguments in (["inspect", "X"], ["verify", "X"], ["convert", "X", "Y"]):
        assert cli.main([*arguments, "--json"]) == 2
        captured = capsys.readouterr()
        assert f"shardstep: {json.loads(captured.out)['error']}\n" == captured.err
    path = place / "run" / "step-a" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    assert cli.main(["verify", str(path.parent), "--json"]) == 1
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert told["ok"] is False
    assert [f"shardstep: {problem}" for problem in told["problems"]] == captured.err.splitlines()
    assert str(path) in captured.err


# --- where it lies ------------------------------------------------------------------------------------------------


class AppState(dcp.stateful.Stateful):
    """As torch's tutorial has it."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: bool) -> None:
        self.model, self.optimizer, self.options = model, optimizer, StateDictOptions(**options)

    def state_dict(self) -> dict[str, Any]:
        optim = get_optimizer_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": self.model.state_dict(), "optim": optim}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


def assert_loads_as(file: Path, expected: torch.optim.Optimizer) -> None:
    """The file is what the optimizer's own state dict is, and a plain optimizer takes it."""
    found, wanted = torch.load(file, weights_only=True), expected.state_dict()
    assert found["state"].keys() == wanted["state"].keys()
    for index, entry in wanted["state"].items():
        assert found["state"][index].keys() == entry.keys()
        assert all(torch.equal(found["state"][index][key], value) for key, value in entry.items())
    assert [group["params"] for group in found["param_groups"]] == [group["params"] for group in wanted["param_groups"]]
    fresh = torch.optim.AdamW([torch.zeros_like(p) for p in expected.param_groups[0]["params"]], lr=1.0)
    fresh.load_state_dict(found)
    assert fresh.param_groups[0]["lr"] == wanted["param_groups"][0]["lr"]


@pytest.mark.parametrize("outer", ["app", "app.v1"])
def test_convert_takes_an_optimizer_that_lies_deeper(outer, tmp_path, capsys) -> None:
    model, optimizer = trained()
    save_with_dcp({outer: AppState(model, optimizer)}, tmp_path / "dcp")
    directory, file = str(tmp_path / "dcp"), tmp_path / "out.pt"
    assert cli.main(["convert", directory, str(file)]) == 2
    told = the_line(capsys.readouterr().err)
    assert told.endswith(f"has its optimizer under '{outer}.optim': pass --key {outer}.optim")
    assert cli.main(["convert", directory, str(file), "--key", outer]) == 2  # both parts are there
    assert f"pass --key {outer}.optim" in the_line(capsys.readouterr().err)
    assert cli.main(["convert", directory, str(file), "--part", "model"]) == 2
    assert f"pass --key {outer}.model" in the_line(capsys.readouterr().err)
    assert not file.exists()
    assert cli.main(["convert", directory, str(file), "--key", f"{outer}.optim"]) == 0
    assert_loads_as(file, optimizer)
    assert cli.main(["convert", directory, str(file), "--key", f"{outer}.model"]) == 0
    found = torch.load(file, weights_only=True)
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[key], value) for key, value in model.state_dict().items())
    capsys.readouterr()
    assert cli.main(["inspect", directory, "--json"]) == 0
    assert read_json(capsys)["steps"] == [3.0]


def test_convert_takes_an_optimizer_that_is_everything(tmp_path, capsys) -> None:
    model, optimizer = trained()
    save_with_dcp(get_optimizer_state_dict(model, optimizer), tmp_path / "dcp")
    assert cli.main(["convert", str(tmp_path / "dcp"), str(tmp_path / "out.pt")]) == 2
    assert the_line(capsys.readouterr().err).endswith("pass --key .")
    assert cli.main(["convert", str(tmp_path / "dcp"), str(tmp_path / "out.pt"), "--key", "."]) == 0
    assert_loads_as(tmp_path / "out.pt", optimizer)


def test_a_key_that_is_not_there_is_told_with_those_that_are(place, capsys) -> None:
    for key in ("app.optim", "optim.stat", "optim.param_groups.0.lr", ""):
        arguments = ["convert", str(place / "run" / "step-a"), str(place / "out.pt"), "--key", key]
        assert cli.main(arguments) == 2, key
        assert "but has the keys ['model', 'optim']" in the_line(capsys.readouterr().err)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["convert", "DIR", "out.pt", "--key", "optim", "--part", "model"])


def test_a_flattened_optimizer_is_refused_with_what_reads_it(tmp_path, capsys) -> None:
    model, optimizer = trained()
    state = AppState(model, optimizer, flatten_optimizer_state_dict=True)
    save_with_dcp({"app": state}, tmp_path / "dcp")
    assert cli.main(["convert", str(tmp_path / "dcp"), str(tmp_path / "out.pt"), "--key", "app.optim"]) == 2
    assert "set_optimizer_state_dict" in the_line(capsys.readouterr().err)


def test_what_is_no_optimizer_is_written_as_it_was_saved(with_extra, tmp_path) -> None:
    assert cli.main(["convert", str(with_extra), str(tmp_path / "extra.pt"), "--key", "extra"]) == 0
    found = torch.load(tmp_path / "extra.pt", weights_only=True)
    assert found.keys() == EXTRA.keys()
    leaves, structure = tree_flatten(found)
    wanted, structure_wanted = tree_flatten(EXTRA)
    assert structure == structure_wanted
    for leaf, value in zip(leaves, wanted, strict=True):
        assert torch.equal(leaf, value) if isinstance(value, torch.Tensor) else leaf == value
    assert zipfile.ZipFile(tmp_path / "extra.pt").testzip() is None


class Counting(torch.nn.Linear):
    """A module with state of its own, as torch allows: anything."""

    seen: Any = None

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def test_the_file_of_a_model_loads_with_its_extra_state(tmp_path) -> None:
    model, fresh = Counting(2, 2), Counting(2, 2)
    model.seen = {"batches": 3, "mean": (torch.ones(2),)}
    checkpoint.save(tmp_path / "dir", torch.optim.SGD(model.parameters()), model)
    assert cli.main(["convert", str(tmp_path / "dir"), str(tmp_path / "model.pt"), "--part", "model"]) == 0
    fresh.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(fresh.weight, model.weight)
    assert fresh.seen["batches"] == 3
    assert torch.equal(fresh.seen["mean"][0], torch.ones(2))


def test_a_file_may_hold_its_optimizer_deeper_too(tmp_path, capsys) -> None:
    model, optimizer = trained()
    torch.save({"step": 3, "model": model.state_dict(), "my.optim": optimizer.state_dict()}, tmp_path / "all.pt")
    arguments = ["convert", str(tmp_path / "all.pt"), str(tmp_path / "dir")]
    assert cli.main(arguments) == 2
    assert "pass --key my.optim" in the_line(capsys.readouterr().err)
    for wrong in ("model", "nothing"):
        assert cli.main([*arguments, "--key", wrong]) == 2
        assert "all.pt" in the_line(capsys.readouterr().err)
    assert not (tmp_path / "dir").exists()
    assert cli.main([*arguments, "--key", "my.optim"]) == 0
    assert cli.main(["convert", str(tmp_path / "dir"), str(tmp_path / "back.pt")]) == 0
    assert_loads_as(tmp_path / "back.pt", optimizer)


# --- state that is not there --------------------------------------------------------------------------------------


def save_where_it_is_not(rank: int, world_size: int, folder: Path) -> None:
    param = torch.nn.Parameter(torch.ones(6))
    optimizer = ZeroRedundancyOptimizer([param], torch.optim.AdamW, lr=0.1)
    param.grad = torch.ones(6)
    optimizer.step()
    optimizer.consolidate_state_dict(to=1)
    torch.save(optimizer.state_dict(), folder / f"rank-{rank}.pt")


def test_the_dict_of_a_rank_without_the_state_is_refused(tmp_path, capsys) -> None:
    run_ranks(save_where_it_is_not, 2, tmp_path)
    assert cli.main(["convert", str(tmp_path / "rank-0.pt"), str(tmp_path / "dir")]) == 1
    assert "Convert what rank 1 saved" in the_line(capsys.readouterr().err)
    assert not (tmp_path / "dir").exists()
    assert cli.main(["convert", str(tmp_path / "rank-1.pt"), str(tmp_path / "dir")]) == 0
    assert capsys.readouterr().err == ""
    marked = {**torch.load(tmp_path / "rank-0.pt", weights_only=True), MARK: [1, 3]}
    torch.save({"optim": marked}, tmp_path / "several.pt")
    assert cli.main(["convert", str(tmp_path / "several.pt"), str(tmp_path / "none"), "--key", "optim"]) == 1
    assert "Convert what rank 1 or rank 3 saved" in the_line(capsys.readouterr().err)


def test_a_state_dict_from_before_the_first_step_is_converted_and_told(tmp_path, capsys) -> None:
    model, _ = trained()
    torch.save(torch.optim.AdamW(model.parameters()).state_dict(), tmp_path / "new.pt")
    assert cli.main(["convert", str(tmp_path / "new.pt"), str(tmp_path / "dir"), "--json"]) == 0
    captured = capsys.readouterr()
    assert "no state for its 4 parameters" in the_line(captured.err)
    assert json.loads(captured.out)["target"] == str(tmp_path / "dir")
    assert cli.main(["verify", str(tmp_path / "dir")]) == 0

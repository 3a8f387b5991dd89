"""The command line: look into checkpoints, check them, turn them into plain files and back.

On the day when something is wrong it says what in one line, with an exit code that can be trusted. Most is tried in
this process, where an error that nobody caught fails the test as well; pipes, signals, permissions and full disks in
processes of their own.
"""

from __future__ import annotations

import json
import os
import resource
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

import shardstep
from shardstep import checkpoint, cli
from tests.checkpoints import Weights, everything_in, plain, sharded, step
from tests.fixtures.scenarios import SAVED
from tests.harness import run_ranks
from tests.oracle import assert_same

EXTRA = {
    "step": 3,
    "nothing": {},
    "scheduler": {"base_lrs": [0.1], "by_number": {1: "one"}},
    "random": (3, tuple(range(625)), None),
    "noise": torch.arange(2.0),
    "in_a_tuple": (torch.arange(3.0), "beside"),
    "text": "words " * 50,
    "infinite": float("inf"),
}


def save_sharded(rank: int, world_size: int, directory: Path) -> None:
    model, optimizer = sharded(3)
    checkpoint.save(directory, optimizer, model, EXTRA)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints") / "three-steps"
    run_ranks(save_sharded, 3, directory)
    return directory


def save_with_dcp(form: dict[str, Any], directory: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that this process is alone; it would be on standard error, too
        dcp.save(form, checkpoint_id=directory)


def run(*arguments: Any) -> int:
    return cli.main([str(argument) for argument in arguments])


def the_line(captured: str) -> str:
    assert captured.endswith("\n")
    (line,) = captured.splitlines()
    assert line.startswith("shardstep: ")
    return line


def load(file: Path) -> Any:
    return torch.load(file, weights_only=True)


# --- what is inside ---------------------------------------------------------------------------------------------------


def test_inspect_tells_names_shapes_bytes_values_step_and_writers_as_json(saved, capsys):
    assert run("inspect", saved, "--json") == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    told = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert (told["ranks"], told["steps"], told["checksums"]) == ([0, 1, 2], [3.0], True)
    assert sum(told["files"].values()) == sum(path.stat().st_size for path in saved.glob("*.distcp"))
    entries = {entry["key"]: entry for entry in told["entries"]}
    moment = entries["optim.state.w0.exp_avg"]
    assert (moment["shape"], moment["dtype"], moment["bytes"]) == ([96, 130], "float64", 96 * 130 * 8)
    assert moment["pieces"] > 1  # the parameter is cut
    assert entries["extra.noise"]["shape"] == [2]
    values = {key: entry["value"] for key, entry in entries.items() if entry["kind"] == "value"}
    assert (values["optim.param_groups.0.lr"], values["optim.param_groups.0.betas"]) == (0.01, [0.9, 0.999])
    assert {key: value for key, value in values.items() if key.startswith("extra.")} == {
        "extra.step": 3,
        "extra.nothing": {},
        "extra.scheduler": {"base_lrs": [0.1], "by_number": {"1": "one"}},
        "extra.random": [3, list(range(625)), None],
        "extra.in_a_tuple": ["tensor([0., 1., 2.])", "beside"],
        "extra.text": "words " * 50,
        "extra.infinite": "inf",
    }


@pytest.mark.parametrize("hidden", [None, "rich"])
def test_inspect_shows_a_table_with_the_beginning_of_long_values(hidden, saved, capsys, monkeypatch):
    if hidden:
        monkeypatch.setitem(sys.modules, hidden, None)
    assert run("inspect", saved) == 0
    shown = capsys.readouterr().out
    for text in ("optim.state.w2.exp_avg", "96x130", "float64", "written by ranks 0, 1, 2", "step 3"):
        assert text in shown
    rows = {key: row for row in shown.splitlines() for key in row.split() if "extra." in key}
    assert "{'base_lrs': [0.1]" in rows["extra.scheduler"]
    assert "(3, (0, 1, 2," in rows["extra.random"]
    assert "…" in rows["extra.text"]
    assert max(map(len, rows.values())) <= 160


def test_inspect_shows_the_rest_of_a_checkpoint_with_something_that_only_code_could_read(tmp_path, capsys):
    save_with_dcp({"app": {"path": Path("x"), "step": 7}}, tmp_path / "dcp")
    assert run("inspect", tmp_path / "dcp", "--json") == 0
    values = {entry["key"]: entry["value"] for entry in json.loads(capsys.readouterr().out)["entries"]}
    assert values == {"app.path": "(not plain data)", "app.step": 7}


def test_every_command_answers_with_one_json_object_also_if_it_failed(saved, tmp_path, capsys):
    file, back = tmp_path / "out.pt", tmp_path / "back"
    data = sum(path.stat().st_size for path in saved.glob("*.distcp"))
    for command, told in (
        (["verify", saved], {"directory": str(saved), "ok": True, "bytes": data, "problems": []}),
        (["convert", saved, file], {"source": str(saved), "target": str(file), "key": "optim"}),
        (["convert", file, back], {"source": str(file), "target": str(back), "key": "."}),
    ):
        assert run(*command, "--json") == 0
        assert told.items() <= json.loads(capsys.readouterr().out).items()
    os.truncate(back / "__0_0.distcp", 1000)
    assert run("verify", back, "--json") == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["ok"] is False
    assert str(back / "__0_0.distcp") in the_line(captured.err)
    assert run("inspect", "X", "--json") == 2
    captured = capsys.readouterr()
    assert f"shardstep: {json.loads(captured.out)['error']}\n" == captured.err


# --- convert ----------------------------------------------------------------------------------------------------------


def go_on_from(rank: int, world_size: int, directory: Path) -> None:
    """Load into a sharded optimizer of a model that is as far, and train on."""
    model, _ = plain(3)
    _, optimizer = sharded(0, model)
    checkpoint.load(directory, optimizer)
    step(model, optimizer, range(3, 6))
    assert_same(everything_in(model, optimizer), everything_in(*plain(6)))


def test_convert_makes_plain_state_dicts_and_back_again_training_goes_on_exactly(saved, tmp_path):
    model, optimizer = plain(3)
    for part, expected in (("optim", optimizer.state_dict()), ("model", dict(model.state_dict()))):
        assert run("convert", saved, tmp_path / part, "--part", part) == 0
        assert_same(load(tmp_path / part), expected, part)
        assert zipfile.ZipFile(tmp_path / part).testzip() is None
    assert run("convert", saved, tmp_path / "extra", "--key", "extra") == 0
    assert_same(load(tmp_path / "extra"), EXTRA)
    assert sorted(os.listdir(tmp_path)) == ["extra", "model", "optim"]
    assert run("convert", tmp_path / "optim", tmp_path / "back") == 0
    assert run("verify", tmp_path / "back") == 0
    run_ranks(go_on_from, 2, tmp_path / "back")


class AppState(dcp.stateful.Stateful):
    """As torch's tutorial has it."""

    def __init__(self, **options: bool) -> None:
        (self.model, self.optimizer), self.options = plain(3), StateDictOptions(**options)

    def state_dict(self) -> dict[str, Any]:
        optim = get_optimizer_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": self.model.state_dict(), "optim": optim}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


def test_convert_takes_an_optimizer_that_lies_deeper(tmp_path, capsys):
    """In a directory of DCP, in a file, or as all there is. Without --key it is told which one to pass."""
    state = AppState()
    save_with_dcp({"app.v1": state}, tmp_path / "deep")
    save_with_dcp(get_optimizer_state_dict(state.model, state.optimizer), tmp_path / "all")
    form = {"step": 3, "model": state.model.state_dict(), "my.optim": state.optimizer.state_dict()}
    torch.save(form, tmp_path / "file.pt")
    for source, target, key in (
        ("deep", "deep.pt", "app.v1.optim"),
        ("all", "all.pt", "."),
        ("file.pt", "dir", "my.optim"),
    ):
        asked = ["convert", tmp_path / source, tmp_path / target]
        for more, told in (([], f"pass --key {key}"), (["--key", "nothing"], source)):
            assert run(*asked, *more) == 2
            assert told in the_line(capsys.readouterr().err)
        assert not (tmp_path / target).exists()
        assert run(*asked, "--key", key) == 0
    assert run("convert", tmp_path / "dir", tmp_path / "back.pt") == 0
    for file in ("deep.pt", "all.pt", "back.pt"):
        assert_same(load(tmp_path / file)["state"], state.optimizer.state_dict()["state"], file)
        torch.optim.AdamW(state.model.parameters()).load_state_dict(load(tmp_path / file))
    assert run("convert", tmp_path / "deep", tmp_path / "model.pt", "--key", "app.v1.model") == 0
    assert_same(load(tmp_path / "model.pt"), dict(state.model.state_dict()))


def test_state_that_is_not_there_is_told(tmp_path, capsys):
    assert run("convert", SAVED / "saved_by_0_1" / "consolidated-3" / "marked.state", tmp_path / "dir") == 1
    assert "Convert what rank 1 saved" in the_line(capsys.readouterr().err)
    assert not (tmp_path / "dir").exists()
    torch.save(plain(0)[1].state_dict(), tmp_path / "new.pt")
    assert run("convert", tmp_path / "new.pt", tmp_path / "dir") == 0
    assert "no state for its 5 parameters" in the_line(capsys.readouterr().err)
    save_with_dcp({"app": AppState(flatten_optimizer_state_dict=True)}, tmp_path / "flat")
    assert run("convert", tmp_path / "flat", tmp_path / "out.pt", "--key", "app.optim") == 2
    assert "set_optimizer_state_dict" in the_line(capsys.readouterr().err)


MEASURED = """
import sys
from pathlib import Path
from shardstep import cli
def status(field):
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith(field))
cli.main(["convert", sys.argv[1], sys.argv[3] + ".warm"])  # everything that is imported late
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
assert cli.main(["convert", sys.argv[2], sys.argv[3]]) == 0
print("grown", status("VmHWM") - before)
"""


@pytest.mark.long
def test_convert_holds_no_more_than_a_window(tmp_path):
    """Two tensors of 64 MiB; the process may grow by half of one: a window of 16 MiB, and its surroundings."""
    for name, size in (("small", 3), ("large", 4096)):
        _, optimizer = plain(1, Weights([(size, size // 2)]))
        checkpoint.save(tmp_path / name, optimizer)
    paths = [str(tmp_path / name) for name in ("small", "large", "out.pt")]
    done = subprocess.run([sys.executable, "-c", MEASURED, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.rsplit("grown", 1)[1]) < 32 * 1024, done.stdout
    assert_same(load(tmp_path / "out.pt")["state"], optimizer.state_dict()["state"])


# --- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path) -> Path:
    """A directory with everything that a command could be given: right and wrong."""
    model, optimizer = plain(3)
    for name in ("step-b", "step-a"):  # the newest is not the last by name
        checkpoint.save(tmp_path / "run" / name, optimizer, model)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save({"weights": torch.ones(3)}, tmp_path / "model.pt")
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("text")
    os.mkfifo(tmp_path / "fifo")
    return tmp_path


def files_in(directory: Path) -> dict[str, float]:
    return {str(path): path.lstat().st_mtime for path in directory.rglob("*") if not path.is_dir()}


SOURCES = {
    "missing": "does not exist",
    "text.txt": "is a file",
    "empty": "holds no checkpoint",
    "run": "the newest is {place}/run/step-a",
    "run/step-a/.metadata": "Pass its directory, {place}/run/step-a.",
}
CONVERSIONS = {
    ("missing", "out.pt"): "missing does not exist",
    ("run", "out.pt"): "the newest is {place}/run/step-a",
    ("fifo", "new"): "fifo is neither",
    ("model.pt", "new"): "model.pt",
    ("run/step-a", "nowhere/out.pt"): "nowhere does not exist. Make it: mkdir -p {place}/nowhere",
    ("run/step-a", "empty"): "empty is a directory. Pass the name of a file, such as {place}/empty/optimizer.pt.",
    ("run/step-a", "fifo"): "no ordinary file",
    ("optimizer.pt", "text.txt"): "text.txt is a file",
    ("optimizer.pt", "full"): "full is something else",
    ("optimizer.pt", "run/step-a"): "holds a checkpoint",
}


def test_a_wrong_path_is_told_in_one_line_and_a_conversion_that_cannot_be_leaves_nothing(place, capsys):
    before = files_in(place)
    cases = [((command, place / source), told) for command in ("inspect", "verify") for source, told in SOURCES.items()]
    cases += [(("convert", place / one, place / other), told) for (one, other), told in CONVERSIONS.items()]
    for command, told in cases:
        assert run(*command) == 2, command
        captured = capsys.readouterr()
        assert told.format(place=place) in the_line(captured.err), command
        assert captured.out == ""
    assert files_in(place) == before
    assert not (place / "nowhere").exists()


@pytest.mark.parametrize("command", ["inspect", "verify", "convert"])
def test_a_checkpoint_that_lacks_a_file_is_damaged_not_a_wrong_path(command, place, capsys):
    for name, lost in (("step-a", ".metadata"), ("step-b", "__0_0.distcp")):
        path = place / "run" / name
        (path / lost).unlink()
        assert run(command, path, *([place / "out.pt"] if command == "convert" else [])) == 1
        assert lost in the_line(capsys.readouterr().err)


def test_verify_reads_every_byte_of_what_dcp_wrote_too(tmp_path, capsys):
    save_with_dcp({"x": torch.arange(5000.0)}, tmp_path / "dcp")
    assert run("verify", tmp_path / "dcp") == 0
    path = tmp_path / "dcp" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(5000.0).numpy().tobytes()) + 1000] ^= 1
    path.write_bytes(data)
    assert run("verify", tmp_path / "dcp") == 1
    assert str(path) in the_line(capsys.readouterr().err)


# --- processes of their own -------------------------------------------------------------------------------------------

SHARDSTEP = [sys.executable, "-m", "shardstep"]
MANY = """
import json, sys
from shardstep.cli import main
for arguments in json.loads(sys.argv[1]):
    print(main(arguments), end=" ", flush=True)
"""


@pytest.mark.long
def test_a_full_disk_is_told_in_one_line_and_leaves_nothing(place):
    """A limit on the size of a file stands for the disk: the same call of the system fails."""
    commands = [
        ["convert", str(place / "run" / "step-a"), str(place / "out.pt")],
        ["convert", str(place / "optimizer.pt"), str(place / "new")],
    ]
    before = files_in(place)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    command = [sys.executable, "-c", MANY, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert done.stdout.split() == ["2", "2"], done.stderr
    for line, name in zip(done.stderr.splitlines(), ("out.pt", "new"), strict=True):
        assert line.startswith(f"shardstep: {place / name}: File too large")
    assert files_in(place) == before
    assert not list(place.glob(".*"))


@pytest.mark.long
def test_output_that_nobody_reads_or_that_cannot_be_written(place):
    # An environment in which output fails late, as it does for people.
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    options: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "env": buffered}
    reading, writing = os.pipe()
    os.close(reading)
    directory = str(place / "run" / "step-a")
    for arguments in (["inspect", directory], ["inspect", directory, "--json"], ["--help"]):
        done = subprocess.run([*SHARDSTEP, *arguments], stdout=writing, **options)
        assert (done.returncode, done.stderr) == (141, "")
    os.close(writing)
    with open("/dev/full", "w") as full:
        done = subprocess.run([*SHARDSTEP, "verify", directory], stdout=full, **options)
    assert "No space left" in the_line(done.stderr)
    assert done.returncode == 2


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it
from shardstep import cli
def touched(event, arguments):
    if event == "open" and "__0_0.distcp" in str(arguments[0]):
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(touched)
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.parametrize(("source", "target"), [("run/step-a", "out.pt"), ("optimizer.pt", "new")])
def test_control_c_is_quiet_and_leaves_nothing(source, target, place):
    """The signal comes when the data is read, or when it is written."""
    before = files_in(place)
    command = [sys.executable, "-c", INTERRUPTED, "convert", str(place / source), str(place / target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, the_line(done.stderr)) == (130, "shardstep: interrupted.")
    assert files_in(place) == before
    assert not list(place.glob(".*"))


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        run("--version")
    assert capsys.readouterr().out == f"shardstep {shardstep.__version__}\n"

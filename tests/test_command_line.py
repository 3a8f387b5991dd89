"""The command line: inspect checkpoints, verify them, convert them to plain files and back.

If something is wrong it says what in one line, with an exit status that can be trusted. Most is tested in this process,
where an exception that nobody caught fails the test; pipes, signals, memory and full disks in processes of their own.
"""

from __future__ import annotations

import json
import math
import os
import pty
import re
import resource
import subprocess
import sys
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import shardstep
from shardstep import checkpoint, cli
from tests.checkpoints import everything_in, plain, sharded, step
from tests.fixtures.scenarios import SAVED
from tests.harness import run_ranks
from tests.oracle import assert_same

UMASK = os.umask(0)
os.umask(UMASK)
FORM = {"a.weight": torch.arange(6.0).view(2, 3), "note": "text"}
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


def error_lines(captured: str) -> list[str]:
    """What is on standard error, without the progress that a slow machine shows."""
    assert captured.endswith("\n")
    return [line for line in captured.splitlines() if not re.fullmatch(r"shardstep: \w+: \d+ %", line)]


def the_line(captured: str) -> str:
    (line,) = error_lines(captured)
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


def test_inspect_shows_a_table_with_the_beginning_of_long_values(saved, capsys):
    assert run("inspect", saved) == 0
    shown = capsys.readouterr().out
    for text in ("optim.state.w2.exp_avg", "96x130", "float64", "written by ranks 0, 1, 2", "step 3"):
        assert text in shown
    rows = {key: row for row in shown.splitlines() for key in row.split() if "extra." in key}
    assert "{'base_lrs': [0.1]" in rows["extra.scheduler"]
    assert "(3, (0, 1, 2," in rows["extra.random"]
    assert "…" in rows["extra.text"]
    assert max(map(len, rows.values())) <= 160


class Layers(torch.nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.head, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 6)
        self.layers = torch.nn.ModuleList(torch.nn.ModuleList([torch.nn.Linear(4, 4)] * 2) for _ in range(count))


def test_inspect_shows_layers_that_are_alike_in_one_row(tmp_path, capsys):
    shown = {}
    for count in (3, 24):
        model = Layers(count)
        optimizer = torch.optim.AdamW(model.parameters())
        sum(param.sum() for param in model.parameters()).backward()
        optimizer.step()
        checkpoint.save(tmp_path / str(count), optimizer, model)
        assert run("inspect", tmp_path / str(count)) == 0
        shown[count] = capsys.readouterr().out.splitlines()
    assert len(shown[24]) == len(shown[3]) <= 50
    rows = {row.split("  ")[0]: row.split() for row in shown[24]}
    assert rows["model.layers.{0-23}.{0-1}.weight (48)"][2:] == ["4x4", "float32", "3,072", "1"]
    assert rows["optim.state.layers.{0-23}.0.bias.exp_avg (24)"][2:] == ["4", "float32", "384", "1"]
    assert rows["model.last.weight"][1:] == ["6x4", "float32", "96", "1"]


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
        for more, told in (([], f"pass --key {key}"), (["--key", "nothing"], f"{source}' has nothing to convert")):
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


def test_convert_takes_one_of_several_optimizers(tmp_path, capsys):
    model, first = plain(2)
    second = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, second, range(2))
    checkpoint.save(tmp_path / "saved", {"adamw": first, "sgd": second}, model)
    assert run("convert", tmp_path / "saved", tmp_path / "out.pt") == 2
    assert "under 'optim.adamw' and 'optim.sgd': pass --key optim.adamw" in the_line(capsys.readouterr().err)
    assert run("convert", tmp_path / "saved", tmp_path / "out.pt", "--key", "optim.sgd") == 0
    assert_same(load(tmp_path / "out.pt"), second.state_dict())


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


def test_convert_refuses_to_overwrite_without_force(saved, tmp_path, capsys):
    file, back = tmp_path / "out.pt", tmp_path / "back"
    for asked in (["convert", saved, file], ["convert", file, back]):
        assert run(*asked) == 0
        before = files_in(tmp_path)
        capsys.readouterr()
        assert run(*asked) == 2
        assert the_line(capsys.readouterr().err).endswith(f"'{asked[-1]}' exists. Pass --force to replace it.")
        assert files_in(tmp_path) == before
        assert run(*asked, "--force") == 0
    assert sorted(os.listdir(tmp_path)) == ["back", "out.pt"]
    assert load(file)["state"].keys() == plain(3)[1].state_dict()["state"].keys()
    assert run("verify", back) == 0


def test_convert_writes_a_model_to_safetensors_with_its_plain_names(saved, tmp_path, capsys):
    assert run("convert", saved, tmp_path / "model.safetensors") == 0
    checkpoint.export_model(saved, tmp_path / "exported.safetensors")
    save_with_dcp({"net": {f"module._orig_mod.{key}": value for key, value in FORM.items()}}, tmp_path / "wrapped")
    assert run("convert", tmp_path / "wrapped", tmp_path / "net.safetensors", "--key", "net") == 0
    assert "left out, because it is not a tensor: note" in the_line(capsys.readouterr().err)
    plain_model = dict(plain(3)[0].state_dict())
    for name, expected in (("model", plain_model), ("exported", plain_model), ("net", {"a.weight": FORM["a.weight"]})):
        file = tmp_path / f"{name}.safetensors"
        assert_same(safetensors.torch.load_file(file), expected)
        assert safetensors.safe_open(file, "pt").metadata() == {"format": "pt"}
        assert file.stat().st_mode & 0o777 == 0o666 & ~UMASK
    assert run("convert", saved, tmp_path / "optim.safetensors", "--part", "optim") == 2
    assert "safetensors are for models" in the_line(capsys.readouterr().err)


def test_what_needs_safetensors_names_the_package_if_it_is_missing(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert run("convert", saved, tmp_path / "model.safetensors") == 2
    assert "pip install 'shardstep[safetensors]'" in the_line(capsys.readouterr().err)
    with pytest.raises(ImportError, match="needs the package safetensors"):
        checkpoint.export_model(saved, tmp_path / "model.safetensors")
    assert os.listdir(tmp_path) == []


MEASURED = """
import sys, threading, time
from pathlib import Path
from shardstep import cli
def anonymous():
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("RssAnon"))
before, most, ended = anonymous(), 0, False
def sample():
    global most
    while not ended:
        most = max(most, anonymous())
        time.sleep(0.005)
sampling = threading.Thread(target=sample)
sampling.start()
status = cli.main(["convert", *sys.argv[1:]])
ended = True
sampling.join()
print("RssAnon", before, most)
sys.exit(status)
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_convert_holds_hardly_anything_of_2_gb(tmp_path):
    """One tensor of 1 GiB and 64 of 16 MiB, mapped by this test as well. What torch imports is not counted: 195 MB."""
    shapes = [(2**28,), *[(2**11, 2**11)] * 64]
    state = {}
    for number, shape in enumerate(shapes):
        name = str(tmp_path / f"memory-{number}")
        moments = torch.from_file(name, shared=True, size=math.prod(shape)).view(-1, 2**22)
        state[number] = {"moments": moments.copy_(torch.arange(2.0**22)).add_(number).view(shape)}
    torch.save({"state": state, "param_groups": [{"params": list(state)}]}, tmp_path / "in.pt")
    for arguments in (["in.pt", "dir"], ["dir", "out.pt"], ["dir", "out.safetensors", "--key", "optim.state"]):
        command = [sys.executable, "-c", MEASURED, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        before, most = map(int, done.stdout.rsplit("RssAnon", 1)[1].split())
        assert most - before < 48 * 1024, done.stdout
        assert "shardstep: converting: 100 %" in done.stderr, "it takes longer than a second"
    written = torch.load(tmp_path / "out.pt", weights_only=True, mmap=True)["state"]
    tensors = safetensors.safe_open(tmp_path / "out.safetensors", "pt")
    for number, entry in state.items():
        assert torch.equal(written[number]["moments"], entry["moments"])
        assert torch.equal(tensors.get_tensor(f"{number}.moments"), entry["moments"])


# --- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path) -> Path:
    """A directory with everything that a command could be given: right and wrong."""
    tmp_path = tmp_path / "a place"
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
    "missing": "no such directory: '{place}/missing'",
    "text.txt": "'{place}/text.txt' is a file",
    "empty": "'{place}/empty' holds no checkpoint",
    "run": "the newest is '{place}/run/step-a'",
    "run/step-a/.metadata": "Pass the directory, '{place}/run/step-a'.",
}
CONVERSIONS = {
    ("missing", "out.pt"): "'{place}/missing' does not exist",
    ("run", "out.pt"): "the newest is '{place}/run/step-a'",
    ("fifo", "new"): "'{place}/fifo' is not a regular file",
    ("model.pt", "new"): "'{place}/model.pt' holds ['weights'], and not what an optimizer's state_dict() returned",
    ("run/step-a", "nowhere/out.pt"): "no such directory: '{place}/nowhere'. Make it: mkdir -p '{place}/nowhere'",
    ("run/step-a", "empty"): "'{place}/empty' is not a regular file. Pass the name of a file",
    ("run/step-a", "fifo"): "'{place}/fifo' is not a regular file",
    ("optimizer.pt", "text.txt"): "'{place}/text.txt' exists and is not a checkpoint",
    ("optimizer.pt", "full"): "'{place}/full' exists and is not a checkpoint",
}


def test_a_wrong_path_is_told_in_one_line_and_a_conversion_that_cannot_be_leaves_nothing(place, capsys):
    before = files_in(place)
    cases = [((command, place / source), told) for command in ("inspect", "verify") for source, told in SOURCES.items()]
    cases += [(("convert", place / one, place / other), told) for (one, other), told in CONVERSIONS.items()]
    cases += [(("convert", *command[1:], "--force"), told) for command, told in cases if command[0] == "convert"]
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


def test_verify_reads_every_byte_of_what_dcp_wrote_too_whatever_a_file_holds(tmp_path, capsys):
    save_with_dcp({"x": torch.arange(5000.0)}, tmp_path / "dcp")
    assert run("verify", tmp_path / "dcp") == 0
    path = tmp_path / "dcp" / "__0_0.distcp"
    whole = path.read_bytes()
    name = whole.rindex(b"PK\x01\x02") + 46  # the last one in the archive's directory, with the flag for UTF-8
    named = whole[: name - 38] + b"\x00\x08" + whole[name - 36 : name] + b"\xff\xfe" + whole[name + 2 :]
    data = whole.index(torch.arange(5000.0).numpy().tobytes()) + 1000
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(whole.index(b"PK\x01\x02"), len(whole), (200,), generator=generator).tolist()
    flipped = [whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :] for at in (data, *places)]
    for number, content in enumerate([named, *flipped]):
        path.write_bytes(content)
        assert run("verify", tmp_path / "dcp") in ([1] if number < 2 else [0, 1])  # some bytes say nothing: dates
        captured = capsys.readouterr().err
        assert number >= 2 or str(path) in the_line(captured)


class Reduced:
    """Pickled, it is a call of any function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def nested(levels: int) -> list[Any]:
    """Lists of the same list twice: 2 ** levels in the end."""
    return [nested(levels - 1)] * 2 if levels else []


HOSTILE = {
    "expanded": lambda: torch.ones(1).expand(2**40),
    "views": lambda: [torch.ones(2**16)] * 2**12,
    "meta": lambda: torch.ones(2**40, device="meta"),
    "sparse": lambda: torch.sparse_coo_tensor([[0]], [1.0], (2**40,)),
    "lists": lambda: nested(60),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_small_file_that_claims_to_hold_much_is_refused_before_anything_is_written(name, tmp_path, capsys):
    form = {"state": {0: {"value": HOSTILE[name]()}}, "param_groups": [{"params": [0]}]}
    torch.save(form, tmp_path / "in.pt")
    assert run("convert", tmp_path / "in.pt", tmp_path / "out") == 1
    assert f"'{tmp_path / 'in.pt'}' " in the_line(capsys.readouterr().err)
    assert os.listdir(tmp_path) == ["in.pt"]


def test_inspect_does_not_show_a_small_value_that_claims_to_hold_much(tmp_path, capsys):
    save_with_dcp({"extra": {"lists": Reduced(OrderedDict, [("a", nested(60))])}}, tmp_path / "dcp")
    assert run("inspect", tmp_path / "dcp") == 0
    assert "(not plain data)" in next(row for row in capsys.readouterr().out.splitlines() if "extra.lists" in row)


@pytest.mark.parametrize("function", [os.system, eval, subprocess.call])
def test_a_file_with_code_is_refused_and_never_makes_us_advise_to_import_something(function, tmp_path, capsys):
    torch.save({"state": {}, "param_groups": Reduced(function, f"touch {tmp_path}/ran")}, tmp_path / "in.pt")
    assert run("convert", tmp_path / "in.pt", tmp_path / "out") == 1
    line = the_line(capsys.readouterr().err)
    assert f"{function.__name__}, which is not plain data" in line
    assert "--import" not in line
    assert os.listdir(tmp_path) == ["in.pt"]


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
        ["convert", str(place / "run" / "step-a"), str(place / "out.safetensors")],
        ["convert", str(place / "optimizer.pt"), str(place / "new")],
    ]
    before = files_in(place)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    command = [sys.executable, "-c", MANY, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert done.stdout.split() == ["2", "2", "2"], done.stderr
    for line, name in zip(error_lines(done.stderr), ("out.pt", "out.safetensors", "new"), strict=True):
        assert line == f"shardstep: '{place / name}': File too large"
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


IMPATIENT = "import sys; from shardstep import cli; cli._PATIENCE = 0; sys.exit(cli.main(sys.argv[1:]))"


def test_progress_is_a_bar_on_a_terminal_and_else_a_line_per_ten_percent(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_PATIENCE", 0)
    assert run("convert", saved, tmp_path / "out.pt") == 0
    lines = capsys.readouterr().err.splitlines()
    numbers = [int(line.removeprefix("shardstep: converting: ").removesuffix(" %")) for line in lines]
    assert 5 < len(numbers) <= 10
    assert numbers == sorted({number // 10 * 10 for number in numbers})
    main_side, other_side = pty.openpty()
    command = [sys.executable, "-c", IMPATIENT, "verify", str(saved)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=other_side, env={**os.environ, "TERM": "xterm"})
    assert done.returncode == 0
    assert "━" in os.read(main_side, 10_000).decode(errors="ignore")


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        run("--version")
    assert capsys.readouterr().out == f"shardstep {shardstep.__version__}\n"

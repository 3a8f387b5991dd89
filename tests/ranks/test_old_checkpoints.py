"""Checkpoints that versions 0.1 and 0.2 wrote (``tests/fixtures``) are read by every later one, at any number of ranks.

Two oracles, neither of which uses our reader:

- what torch itself finds in the files (``dcp_to_torch_save``): what is loaded is the same, bit by bit;
- the plain optimizer that goes on from what torch found, on this CPU: so do we, bit by bit.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardstep import checkpoint, cli
from tests.checkpoints import everything_in, once
from tests.fixtures.scenarios import END, EXTRA, LOADING, SAVED, SAVED_AT, SCENARIOS, Program
from tests.harness import run_ranks
from tests.oracle import assert_same, error_of
from tests.ranks.test_subclass_state import plain_tensors
from tests.versions import with_muon_if_there

CONSOLIDATED = SAVED / "saved_by_0_1" / "consolidated-3"
FULL, MARKED = (CONSOLIDATED / f"{kept}.state" for kept in ("full", "marked"))  # of rank 1, and of another
SAME = "saved_by_0_1/element-3"  # what was consolidated, and what has the weights of the checkpoint without a model


def read_by_torch(directory: Path, to: Path) -> dict[str, Any]:
    dcp_to_torch_save(directory, to)
    return torch.load(to, weights_only=True)


def compute_oracles(root: Path) -> None:
    """For every fixture: what torch finds in it, and the plain optimizer with that, before and after further steps."""
    found = {name: read_by_torch(SAVED / name, root / "read.pt") for name in SCENARIOS}
    for name, form in found.items():
        expected = {"form": form, "model": found[SAME]["model"]} | form
        if SCENARIOS[name].optimizer is not None:  # (Muon, in older versions of torch)
            program = as_torch_found_it(name, expected)
            expected["saved"] = everything_of(program)
            program.train(SAVED_AT, END)
            expected["end"] = everything_of(program)
        (root / name).parent.mkdir(exist_ok=True)
        torch.save(expected, root / f"{name}.pt")


def as_torch_found_it(name: str, found: dict[str, Any]) -> Program:
    """The plain optimizer, as it was saved."""
    program, scenario = Program(name, None, seed=0 if SCENARIOS[name].retrained else 500), SCENARIOS[name]
    if scenario.retrained:
        program.train(0, SAVED_AT)
        return program
    optim = copy.deepcopy(found["optim"])
    masters = {key: entry.pop("master_weight") for key, entry in optim["state"].items() if "master_weight" in entry}
    program.model.load_state_dict({**found["model"], **masters})
    program.optimizer.load_state_dict(optim)  # names in the place of numbers
    if program.scheduler is not None:
        program.scheduler.load_state_dict(found["extra"]["scheduler"])
    return program


def everything_of(program: Program) -> Any:
    """As the plain optimizer has it: masters are its parameters. (And of tensor subclasses what they consist of.)"""
    model, states, options = everything_in(program.model, program.optimizer)
    names = [program.names[param] for group in program.optimizer.param_groups for param in group["params"]]
    for name, state in zip(names, states, strict=True):
        if "master_weight" in state:
            model[name] = state.pop("master_weight")
    for group in options:  # Peculiar counts in groups of which a rank has a parameter only
        group.pop("steps", None)
    return model, plain_tensors(states), options


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    return once(tmp_path_factory, worker_id, "old-checkpoints", compute_oracles)


def expected_of(name: str, oracles: Path) -> dict[str, Any]:
    return torch.load(oracles / f"{name}.pt", weights_only=True)


def test_no_file_was_added_changed_or_lost_since_they_were_written(oracles):
    for saved in SAVED.glob("saved_by_*"):
        files = (path for path in saved.rglob("*") if path.is_file() and path.name != "sha256.json")
        found = {path.relative_to(saved).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        assert found == json.loads((saved / "sha256.json").read_text())
    form = {name: expected_of(name, oracles)["form"] for name in SCENARIOS}  # and they hold what they are kept for
    for name in ("saved_by_0_1/eight-bit-2", "saved_by_0_2/eight-bit-3"):
        assert form[name]["optim"]["state"]["parts.0"]["state1"].dtype == torch.uint8
    assert form["saved_by_0_1/bf16-3"]["optim"]["state"]["weight"]["exp_avg"].dtype == torch.bfloat16
    for kind in ("float32-masters-2", "remainder-masters-3"):
        assert form[f"saved_by_0_2/{kind}"]["optim"]["state"]["weight"]["master_weight"].dtype == torch.float32
    for name in ("saved_by_0_1/sgd-2", "saved_by_0_2/mesh-4"):
        assert_same({key: form[name]["extra"][key] for key in EXTRA}, EXTRA, "extra, as torch finds it")


def numbered(form: dict[str, Any]) -> dict[str, Any]:
    names = [name for group in form["param_groups"] for name in group["params"]]
    groups = [{**group, "params": [names.index(name) for name in group["params"]]} for group in form["param_groups"]]
    return {"state": {names.index(name): entry for name, entry in form["state"].items()}, "param_groups": groups}


def test_the_command_line_verifies_inspects_and_converts_it(oracles, tmp_path, capsys):
    for name, scenario in SCENARIOS.items():
        form, target = expected_of(name, oracles)["form"], tmp_path / "out.pt"
        assert cli.main(["verify", str(SAVED / name)]) == 0
        capsys.readouterr()
        assert cli.main(["inspect", str(SAVED / name), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["ranks"], told["checksums"]) == (list(range(max(scenario.world, 1))), True)
        assert cli.main(["convert", str(SAVED / name), str(target), "--force"]) == 0
        assert_same(torch.load(target, weights_only=True), numbered(form["optim"]), name)
        assert cli.main(["convert", str(SAVED / name), str(target), "--part", "model", "--force"]) == (
            0 if "model" in form else 2
        )
        if "model" in form:
            assert_same(torch.load(target, weights_only=True), form["model"], name)
    assert cli.main(["convert", str(FULL), str(tmp_path / "back")]) == 0
    found = read_by_torch(tmp_path / "back", tmp_path / "read.pt")
    assert_same(numbered(found["optim"]), torch.load(FULL, weights_only=True))


def unlike(name: str, mode: str | None) -> Program:
    """A new program as it is before it loads: other weights, other options. None of them may survive."""
    program = Program(name, mode, seed=500)
    for group in program.optimizer.param_groups:
        group["lr"] *= 7
    return program


def load_and_go_on(name: str, mode: str | None, expected: dict[str, Any], claim: str) -> None:
    """With ``mode`` None the plain optimizer does. Collective otherwise."""
    program = unlike(name, mode)
    extra = checkpoint.load(SAVED / name, program.optimizer, program.model if program.scenario.named else None)
    assert_same(extra, expected.get("extra", {}), f"{claim}: extra")
    if not program.scenario.named:
        program.model.load_state_dict(expected["model"])
    if program.scheduler is not None:
        program.scheduler.load_state_dict(extra["scheduler"])
    check_and_go_on(program, expected, claim)


def check_and_go_on(program: Program, expected: dict[str, Any], claim: str) -> None:
    assert_same(everything_of(program), expected["saved"], claim)
    program.train(SAVED_AT, END)
    assert_same(everything_of(program), expected["end"], f"{claim}, trained")


@pytest.mark.parametrize("name", with_muon_if_there(SCENARIOS))
def test_the_plain_optimizer_loads_it_and_goes_on_as_if_never_interrupted(oracles, name):
    load_and_go_on(name, None, expected_of(name, oracles), name)


def load_all(rank: int, world: int, oracles: Path, modes: tuple[str, ...]) -> None:
    gc.freeze()  # with shard_gradients each optimizer looks for DDP among all objects: not among those of all modules
    for name, scenario in SCENARIOS.items():
        for mode in set(modes) & set(scenario.modes) if scenario.optimizer is not None else ():
            load_and_go_on(name, mode, expected_of(name, oracles), f"{name} loaded at {world} in {mode}")
    expected, full, marked = expected_of(SAME, oracles), *(torch.load(f, weights_only=True) for f in (FULL, MARKED))
    for mode in modes:
        program = unlike(SAME, mode)  # dcp.load of a directory
        form = {"model": program.model.state_dict(), "optim": program.optimizer.sharded_state_dict(program.model)}
        dcp.load(form, checkpoint_id=SAVED / SAME)
        program.model.load_state_dict(form["model"])
        program.optimizer.load_sharded_state_dict(form["optim"], program.model)
        check_and_go_on(program, expected, f"{mode}, dcp.load")
        program = unlike(SAME, mode)  # a consolidated state dict; and one of a rank that had no state
        refusal = error_of(lambda program=program: program.optimizer.load_state_dict(marked))
        assert isinstance(refusal, ValueError)
        assert "rank 1" in str(refusal)
        program.model.load_state_dict(expected["model"])
        program.optimizer.load_state_dict(full)
        check_and_go_on(program, expected, f"{mode}, consolidated")


@pytest.mark.parametrize(
    ("world", "modes"), [(3, ("zero2",)), pytest.param(2, ("element", "tensor"), marks=pytest.mark.long)]
)
def test_it_loads_in_every_mode_and_training_goes_on_as_if_never_interrupted(oracles, world, modes):
    assert set(modes) <= set(LOADING)
    run_ranks(load_all, world, oracles, modes, timeout=300)  # 31 checkpoints

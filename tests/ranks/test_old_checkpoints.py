"""Checkpoints that version 0.1 wrote (``tests/fixtures``) are read by every later version, at any number of ranks.

Three oracles, none of which uses our reader:

- what torch itself finds in the files (``dcp_to_torch_save``): what is loaded is the same, bit by bit;
- the plain optimizer that goes on from what torch found, on this CPU: so do we, bit by bit;
- the plain optimizer that was never interrupted, on this CPU. The files come from another one, whose kernels may round
  differently: weights are as close as each scenario states, with its reason.
"""

from __future__ import annotations

import copy
import gc
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardstep import checkpoint
from shardstep.checkpoint import CheckpointError
from shardstep.tools import cli
from tests import twins
from tests.fixtures.scenarios import (
    CONSOLIDATED,
    DIGESTS,
    END,
    EXTRA,
    MODES,
    RECIPIENT,
    SAVED,
    SAVED_AT,
    SCENARIOS,
    Program,
)
from tests.fixtures.write import digests
from tests.harness import run_ranks
from tests.oracle import assert_same, error_of
from tests.ranks.test_checkpoint import once
from tests.versions import with_muon_if_there

LIMITS = {"timeout": 80, "pg_timeout": 30}
FULL, MARKED = (SAVED / CONSOLIDATED / f"{kept}.state" for kept in ("full", "marked"))
SAME = "element-3"  # what was consolidated, and what has the weights of the checkpoint without a model


# --- oracles --------------------------------------------------------------------------------------------------------


def read_by_torch(directory: Path, to: Path) -> dict[str, Any]:
    dcp_to_torch_save(directory, to)
    return torch.load(to, weights_only=True)


def resumed(name: str, found: dict[str, Any]) -> Program:
    """The plain optimizer with what torch found. (Its ``load_state_dict`` takes names for numbers.)"""
    program = Program(name, None, seed=500)
    program.model.load_state_dict(found["model"])
    program.optimizer.load_state_dict(copy.deepcopy(found["optim"]))  # it steps in the tensors it is given
    if program.scheduler is not None:
        program.scheduler.load_state_dict(found["extra"]["scheduler"])
    return program


def trained(program: Program, start: int) -> dict[str, Tensor]:
    """The weights at the end."""
    program.train(start, END)
    return program.weights()


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A directory with, for every fixture, what torch finds in it and what the plain optimizer makes of it."""
    return once(tmp_path_factory, worker_id, "old-checkpoints", compute_oracles)


def compute_oracles(root: Path) -> None:
    found = {name: read_by_torch(SAVED / name, root / "read.pt") for name in SCENARIOS}
    for name, form in found.items():
        saved = {"model": found[SAME]["model"], **form}
        expected: dict[str, Any] = {"form": form, "saved": saved}
        if SCENARIOS[name].optimizer is not None:  # (Muon, in older versions of torch)
            expected["resumed"] = trained(resumed(name, saved), SAVED_AT)
            expected["uninterrupted"] = uninterrupted(name)
        torch.save(expected, root / f"{name}.pt")


def expected_of(name: str, oracles: Path) -> dict[str, Any]:
    return torch.load(oracles / f"{name}.pt", weights_only=True)


def uninterrupted(name: str) -> dict[str, Tensor]:
    program = Program(name, None)
    program.train(0, SAVED_AT)  # (schedule-free optimizers stop here, too, to be evaluated)
    return trained(program, SAVED_AT)


# --- the files ------------------------------------------------------------------------------------------------------


def test_no_file_was_added_changed_or_lost_since_they_were_written():
    assert digests(SAVED) == json.loads((SAVED / DIGESTS).read_text())
    assert {path.name for path in SAVED.iterdir()} == {*SCENARIOS, CONSOLIDATED, DIGESTS}


def test_the_fixtures_hold_what_they_are_kept_for(oracles):
    """Otherwise the tests below show nothing."""
    pieces = {name: dcp.FileSystemReader(SAVED / name).read_metadata().state_dict_metadata for name in SCENARIOS}
    for name, scenario in SCENARIOS.items():
        cut = {
            key
            for key, entry in pieces[name].items()
            if key.startswith("optim.state") and len(getattr(entry, "chunks", ())) > 1
        }
        is_cut = scenario.mode in ("element", "zero2") and "element" in scenario.modes
        assert bool(cut) == is_cut, f"{name}: {cut}"
        assert len(list((SAVED / name).glob("*.distcp"))) == max(scenario.world, 1), name
    form = {name: expected_of(name, oracles)["form"] for name in SCENARIOS}
    assert form["eight-bit-2"]["optim"]["state"]["parts.0"]["state1"].dtype == torch.uint8
    assert form["bf16-3"]["optim"]["state"]["weight"]["exp_avg"].dtype == torch.bfloat16
    assert set(form["unnamed-3"]) == {"optim"}
    assert set(form["unnamed-3"]["optim"]["state"]) == {"0", "1", "2", "3", "4", "6"}  # 5 is frozen
    assert_same({key: form["sgd-2"]["extra"][key] for key in EXTRA}, EXTRA, "extra, as torch finds it")


@pytest.mark.parametrize("name", SCENARIOS)
def test_verify_and_inspect_accept_it(oracles, name, capsys):
    form = expected_of(name, oracles)["form"]
    checkpoint.verify(SAVED / name)
    assert cli.main(["verify", str(SAVED / name)]) == 0
    assert cli.main(["inspect", str(SAVED / name)]) == 0
    capsys.readouterr()
    assert cli.main(["inspect", str(SAVED / name), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    tensors = {entry["key"]: (entry["shape"], entry["dtype"]) for entry in told["entries"] if entry["kind"] == "tensor"}
    assert tensors == {key: (list(t.shape), str(t.dtype)[6:]) for key, t in tensors_in(form)}
    assert told["ranks"] == list(range(max(SCENARIOS[name].world, 1)))
    assert told["checksums"] is True
    steps = {float(value) for key, value in tensors_in(form) if key.endswith(".step") and key.startswith("optim")}
    assert told["steps"] == sorted(steps)


def tensors_in(form: Any, key: str = "") -> Iterator[tuple[str, Tensor]]:
    """By the keys that DCP gives them."""
    if isinstance(form, Tensor):
        yield key[1:], form
    elif isinstance(form, (dict, list)):
        for part, value in form.items() if isinstance(form, dict) else enumerate(form):
            yield from tensors_in(value, f"{key}.{part}")


@pytest.mark.parametrize("name", SCENARIOS)
def test_convert_makes_the_plain_state_dict_of_it_that_torch_finds(oracles, name, tmp_path):
    form, target = expected_of(name, oracles)["form"], tmp_path / "out.pt"
    assert cli.main(["convert", str(SAVED / name), str(target)]) == 0
    assert_same(torch.load(target, weights_only=True), numbered(form["optim"]), name)
    assert cli.main(["convert", str(SAVED / name), str(target), "--part", "model"]) == (0 if "model" in form else 2)
    if "model" in form:
        assert_same(torch.load(target, weights_only=True), form["model"], name)


def numbered(form: dict[str, Any]) -> dict[str, Any]:
    names = [name for group in form["param_groups"] for name in group["params"]]
    groups = [{**group, "params": [names.index(name) for name in group["params"]]} for group in form["param_groups"]]
    return {"state": {names.index(name): entry for name, entry in form["state"].items()}, "param_groups": groups}


def test_latest_and_resume_find_the_one_that_was_written_last(oracles):
    program = Program("unnamed-3", None, seed=500)
    assert checkpoint.latest(SAVED) == SAVED / "unnamed-3"
    assert checkpoint.resume(SAVED, program.optimizer) == (SAVED / "unnamed-3", {})
    assert_same(program.state(), expected_of("unnamed-3", oracles)["saved"]["optim"])


# --- loading --------------------------------------------------------------------------------------------------------


def unlike(name: str, mode: str | None) -> Program:
    """A new program as it is before it loads: other weights, other options. None of them may survive."""
    program = Program(name, mode, seed=500)
    for group in program.optimizer.param_groups:
        group["lr"] *= 7
    return program


def load_and_go_on(name: str, mode: str | None, expected: dict[str, Any], claim: str, directory: Path = SAVED) -> None:
    """With ``mode`` None the plain optimizer does. Collective otherwise."""
    program, saved = unlike(name, mode), expected["saved"]
    if program.scenario.named:
        extra = checkpoint.load(directory / name, program.optimizer, program.model)
    elif mode == "tensor":  # positions are taken for names
        with pytest.warns(UserWarning, match="holds no model"):
            extra = checkpoint.load(directory / name, program.optimizer, program.model)
    else:
        extra = checkpoint.load(directory / name, program.optimizer)
    assert_same(extra, saved.get("extra", {}), f"{claim}: extra")
    if not program.scenario.named:
        program.model.load_state_dict(saved["model"])
    if program.scheduler is not None:
        program.scheduler.load_state_dict(extra["scheduler"])
    check_and_go_on(program, expected, claim)


def check_and_go_on(program: Program, expected: dict[str, Any], claim: str) -> None:
    assert_same(program.weights(), expected["saved"]["model"], f"{claim}: weights")
    assert_same(program.state(), expected["saved"]["optim"], f"{claim}: state")
    weights = trained(program, SAVED_AT)
    assert_same(weights, expected["resumed"], f"{claim}: weights after training")
    check_close(program, weights, expected, claim)


def check_close(program: Program, weights: dict[str, Tensor], expected: dict[str, Any], claim: str) -> None:
    if program.scenario.close is not None:
        twins.assert_same(weights, expected["uninterrupted"], f"{claim}: interrupted or not", program.scenario.close)


@pytest.mark.parametrize("name", with_muon_if_there(SCENARIOS))
def test_the_plain_optimizer_loads_it_and_goes_on_as_if_never_interrupted(oracles, name):
    load_and_go_on(name, None, expected_of(name, oracles), name)


def load_all(rank: int, world: int, oracles: Path) -> None:
    gc.freeze()  # with shard_gradients each optimizer looks for DDP among all objects: not among those of all modules
    for name, scenario in SCENARIOS.items():
        expected = expected_of(name, oracles)
        for mode in scenario.modes if scenario.optimizer is not None else ():
            load_and_go_on(name, mode, expected, f"{name} loaded at {world} in {mode}")


@pytest.mark.extended
@pytest.mark.long
@pytest.mark.parametrize("world_size", [*(pytest.param(ranks, marks=pytest.mark.again) for ranks in (1, 2)), 3])
def test_it_loads_in_every_mode_and_training_goes_on_as_if_never_interrupted(oracles, world_size):
    run_ranks(load_all, world_size, oracles, **LIMITS)


def load_with_dcp(rank: int, world: int, oracles: Path) -> None:
    gc.freeze()  # as above
    for name in ("element-2", "tensor-3"):
        expected = expected_of(name, oracles)
        for mode in MODES:
            program = unlike(name, mode)
            form = {
                "model": program.model.state_dict(),
                "optim": program.optimizer.sharded_state_dict(program.model),
            }
            if "decoupled_weight_decay" not in program.optimizer.defaults:  # AdamW has it with torch >= 2.7
                for group in expected["saved"]["optim"]["param_groups"]:
                    group.pop("decoupled_weight_decay", None)  # DCP loads the options that are there
            dcp.load(form, checkpoint_id=SAVED / name)
            program.model.load_state_dict(form["model"])
            program.optimizer.load_sharded_state_dict(form["optim"], program.model)
            check_and_go_on(program, expected, f"{name} loaded with dcp.load at {world} in {mode}")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_dcp_loads_it_into_sharded_state_dicts(oracles, world_size):
    run_ranks(load_with_dcp, world_size, oracles, **LIMITS)


# --- consolidated state dicts ---------------------------------------------------------------------------------------


def load_consolidated(rank: int, world: int, oracles: Path) -> None:
    gc.freeze()  # as above
    expected = expected_of(SAME, oracles)
    full, marked = torch.load(FULL, weights_only=True), torch.load(MARKED, weights_only=True)
    assert_same(full, numbered(expected["saved"]["optim"]), "the checkpoint of the same moment")
    for mode in MODES:
        claim = f"consolidated, loaded at {world} in {mode}"
        program = unlike(SAME, mode)
        before = program.state()
        refusal = error_of(lambda program=program: program.optimizer.load_state_dict(marked), claim)
        assert isinstance(refusal, ValueError), repr(refusal)
        assert f"rank {RECIPIENT}" in str(refusal)
        assert_same(program.state(), before, f"{claim}: refused")
        program.model.load_state_dict(expected["saved"]["model"])
        program.optimizer.load_state_dict(full)
        program.optimizer.consolidate_state_dict(to=world - 1)
        if rank == world - 1:
            assert_same(program.optimizer.state_dict(), full, claim)
        check_and_go_on(program, expected, claim)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_consolidated_state_dict_loads_and_one_from_a_rank_without_the_state_is_refused(oracles, world_size):
    run_ranks(load_consolidated, world_size, oracles, **LIMITS)


def test_the_plain_optimizer_loads_a_consolidated_state_dict(oracles):
    expected = expected_of(SAME, oracles)
    program = unlike(SAME, None)
    program.model.load_state_dict(expected["saved"]["model"])
    program.optimizer.load_state_dict(torch.load(FULL, weights_only=True))
    check_and_go_on(program, expected, "consolidated, plain")


def test_a_consolidated_state_dict_is_converted_to_a_checkpoint(oracles, tmp_path):
    assert cli.main(["convert", str(FULL), str(tmp_path / "back")]) == 0
    found = read_by_torch(tmp_path / "back", tmp_path / "read.pt")
    assert_same(numbered(found["optim"]), torch.load(FULL, weights_only=True))


# --- these tests can fail -------------------------------------------------------------------------------------------


def test_one_bit_of_the_state_or_the_weights_that_differs_is_noticed(oracles, tmp_path):
    """Saved anew with one number one step further: every checksum is right, only the number is not."""
    expected = expected_of(SAME, oracles)
    for what in ("weights", "state"):
        program = resumed(SAME, expected["saved"])
        moments = program.optimizer.state[program.model.deep]["exp_avg"]
        number = (moments if what == "state" else program.model.deep.data).view(-1)[37:38]
        number.copy_(torch.nextafter(number, torch.full_like(number, 9)))
        checkpoint.save(tmp_path / SAME, program.optimizer, program.model)
        checkpoint.verify(tmp_path / SAME)
        with pytest.raises(AssertionError, match=rf"altered: {what} .*deep"):
            load_and_go_on(SAME, None, expected, "altered", tmp_path)


@pytest.mark.parametrize("name", with_muon_if_there(name for name in SCENARIOS if SCENARIOS[name].close is not None))
def test_moments_that_were_lost_are_beyond_the_tolerance(oracles, name):
    expected = expected_of(name, oracles)
    program = resumed(name, expected["saved"])
    first = next(entry for entry in program.optimizer.state.values() if entry)
    next(value for value in first.values() if value.dim() > 0).zero_()
    with pytest.raises(AssertionError, match="interrupted or not"):
        check_close(program, trained(program, SAVED_AT), expected, name)


@pytest.mark.parametrize("name", SCENARIOS)
def test_one_byte_that_differs_in_any_file_is_noticed(name, tmp_path):
    for path in sorted((SAVED / name).iterdir()):
        copied = tmp_path / path.name
        shutil.copytree(SAVED / name, copied)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        (copied / path.name).write_bytes(content)
        with pytest.raises(CheckpointError):
            checkpoint.verify(copied)

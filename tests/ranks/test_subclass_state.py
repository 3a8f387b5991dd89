"""State that is a tensor subclass is carried whole, everywhere: state dicts, checkpoints, conversions, memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardstep import ZeroRedundancyOptimizer, checkpoint
from shardstep.params import tensor_subclasses
from shardstep.tools import cli
from tests.harness import run_ranks
from tests.oracle import error_of, train, values_of
from tests.packed import Packed, PackedMomentum
from tests.twins import assert_same, parameters

SHAPES = [(64, 64), (33,), (128, 64), (4096,), (5, 7), (16, 512)]
TORCHAO = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    if name == "PackedMomentum":
        return PackedMomentum
    torch.compiler.set_stance("force_eager")  # torchao compiles its step, half a minute for each shape
    import torchao.optim

    return getattr(torchao.optim, name)


def plain_tensors(value: Any) -> Any:
    """A tree in which tensor subclasses are what they consist of, with their class. (Not by the code under test.)"""
    if isinstance(value, dict):
        return {key: plain_tensors(item) for key, item in value.items()}
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        told = [str(part) for part in context]
        return {"class": type(value).__name__, "context": told} | {name: getattr(value, name) for name in names}
    return value


def same_state(ours: Any, theirs: Any, claim: str) -> None:
    assert_same(plain_tensors(ours), plain_tensors(theirs), claim)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    total = 0
    for entry in optimizer.state.values():
        for value in plain_tensors(dict(entry)).values():
            tensors = value.values() if isinstance(value, dict) else [value]
            total += sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
    return total


def twins(name: str, steps: range, **sharded: Any) -> tuple[Any, Any, Any, Any]:
    kind = optimizer_class(name)
    ours, theirs = parameters(SHAPES, torch.float32), parameters(SHAPES, torch.float32)
    opt, plain = ZeroRedundancyOptimizer(ours, kind, lr=0.01, **sharded), kind(theirs, lr=0.01)
    train(opt, ours, steps)
    train(plain, theirs, steps)
    return ours, opt, theirs, plain


def everywhere(rank: int, world_size: int, name: str, directory: Path, sharded: dict[str, Any]) -> int:
    ours, opt, theirs, plain = twins(name, range(3), **sharded)
    same_state(values_of(ours), values_of(theirs), "weights")
    quantized = sum(hasattr(v, "__tensor_flatten__") for entry in plain.state.values() for v in entry.values())
    assert quantized >= 4, "the case that this test is about"
    for mine, other in zip(ours, theirs, strict=True):
        same_state(opt.full_state(mine), dict(plain.state[other]), "full_state")
    for to in (world_size - 1, 0):
        opt.consolidate_state_dict(to=to)
    form = opt.state_dict()
    if rank == 0:
        same_state({k: dict(v) for k, v in form["state"].items()}, plain.state_dict()["state"], "state_dict")
        torch.save(form, directory / "consolidated.state")
        for value in (value for entry in form["state"].values() for value in entry.values()):
            assert type(value) in (int, Tensor) or tensor_subclasses.is_subclass(value)
    checkpoint.save(directory / "now", opt, extra={"step": 3})
    handle = checkpoint.save(directory / "later", opt, asynchronous=True)
    train(opt, ours, range(3, 5))
    train(plain, theirs, range(3, 5))
    handle.wait()
    same_state(values_of(ours), values_of(theirs), "trained on while saving")
    return opt.memory().state


def go_on(rank: int, world_size: int, name: str, directory: Path, sharded: dict[str, Any]) -> None:
    *_, theirs, plain = twins(name, range(3), **sharded)
    start = values_of(theirs)
    dicts = [twins(name, range(3))[3].state_dict(), torch.load(directory / "consolidated.state", weights_only=True)]
    dicts.append(torch.load(directory / "converted.state", weights_only=True))
    train(plain, theirs, range(3, 6))
    for source in ("now", "later", "back", *dicts):
        again = [torch.nn.Parameter(value.clone()) for value in start]
        opt = ZeroRedundancyOptimizer(again, optimizer_class(name), lr=0.01, **sharded)
        if isinstance(source, str):
            checkpoint.load(directory / source, opt)
        else:
            opt.load_state_dict(source)
        train(opt, again, range(3, 6))
        label = source if isinstance(source, str) else "a dict"
        same_state(values_of(again), values_of(theirs), f"resumed from {label}")
    # and the plain optimizer, new: it has made no state yet that tells the class
    alone = [torch.nn.Parameter(value.clone()) for value in start]
    fresh = optimizer_class(name)(alone, lr=0.01)
    checkpoint.load(directory / "now", fresh)
    train(fresh, alone, range(3, 6))
    same_state(values_of(alone), values_of(theirs), "resumed plainly")


MODES = {"default": {}, "views": {"parameters_as_bucket_view": True}}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("PackedMomentum", "default"),
        ("PackedMomentum", "views"),
        pytest.param("AdamW8bit", "default", marks=pytest.mark.extended),
        *(pytest.param(name, "default", marks=pytest.mark.again) for name in TORCHAO[1:]),
    ],
)
def test_subclass_state_goes_through_every_path_and_training_goes_on_as_if_nothing_happened(name, mode, tmp_path):
    """3 ranks save, 2 go on: bit-equal to the plain optimizer. Together the ranks hold what the plain one holds."""
    if name in TORCHAO:
        pytest.importorskip("torchao")
    held = run_ranks(everywhere, 3, name, tmp_path, MODES[mode], timeout=170)
    _, _, _, plain = _alone(name)
    assert sum(held) == state_bytes(plain)
    assert cli.main(["verify", str(tmp_path / "now")]) == 0
    assert cli.main(["convert", str(tmp_path / "now"), str(tmp_path / "converted.state")]) == 0
    assert cli.main(["convert", str(tmp_path / "converted.state"), str(tmp_path / "back")]) == 0
    run_ranks(go_on, 2, name, tmp_path, MODES[mode], timeout=170)


def _alone(name: str) -> tuple[None, None, Any, Any]:
    theirs = parameters(SHAPES, torch.float32)
    plain = optimizer_class(name)(theirs, lr=0.01)
    train(plain, theirs, range(3))
    return None, None, theirs, plain


@pytest.mark.programs
@pytest.mark.long
def test_a_file_of_torchao_is_converted_with_its_module_imported_and_refused_without(tmp_path):
    """In processes of their own: the class is known only where it was imported."""
    pytest.importorskip("torchao")
    _, _, _, plain = _alone("AdamW8bit")
    torch.save(plain.state_dict(), tmp_path / "ao.state")

    def convert(*more: str) -> subprocess.CompletedProcess:
        command = [
            sys.executable,
            "-m",
            "shardstep.tools.cli",
            "convert",
            str(tmp_path / "ao.state"),
            str(tmp_path / "ao"),
        ]
        return subprocess.run([*command, *more], capture_output=True, text=True)

    done = convert()
    assert done.returncode == 1
    assert "OptimState8bit" in done.stderr
    assert "--import torchao.optim" in done.stderr
    wrong = ["convert", str(tmp_path / "ao.state"), str(tmp_path / "ao"), "--import", "no.such.module"]
    assert cli.main(wrong) == 2
    done = convert("--import", "torchao.optim")
    assert done.returncode == 0, done.stderr
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    fresh = optimizer_class("AdamW8bit")(params, lr=0.01)
    checkpoint.load(tmp_path / "ao", fresh)
    same_state(fresh.state_dict()["state"], plain.state_dict()["state"], "converted")


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(rank: int, world_size: int, directory: Path) -> None:
    params = parameters(SHAPES, torch.float32)
    opt = ZeroRedundancyOptimizer(params, PackedMomentum)
    train(opt, params, range(2))
    checkpoint.save(directory / "packed", opt)
    for other in (
        ZeroRedundancyOptimizer(parameters(SHAPES, torch.float32), torch.optim.SGD, lr=0.1, momentum=0.9),
        ZeroRedundancyOptimizer(parameters(SHAPES, torch.float32), torch.optim.SGD, lr=0.1, shard="tensor"),
        torch.optim.SGD(parameters(SHAPES, torch.float32), lr=0.1),
    ):
        error = error_of(lambda other=other: checkpoint.load(directory / "packed", other))
        assert isinstance(error, (ValueError, RuntimeError))
        assert "Packed" in str(error) or "cannot be cut" in str(error)
        assert not any(other.state.values()), "nothing was changed"
    with pytest.raises(ValueError, match="shard='element' expects an element-wise optimizer"):
        ZeroRedundancyOptimizer(parameters(SHAPES, torch.float32), PackedMomentum, shard="element")


def test_subclass_state_is_not_loaded_into_an_optimizer_that_does_not_make_it(tmp_path):
    run_ranks(refused, 2, tmp_path)


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        ({"class": "os.system"}, "does not make"),
        ({"class": "torch.nn.parameter.Parameter"}, "does not make"),
        ({"shape": [3, 3]}, "another one"),
        ({"context": {"list": []}}, "cannot be put together"),
        ({"context": {"dtype": "nonsense"}}, "does not tell"),
    ],
)
def test_the_name_in_a_file_only_chooses_among_the_classes_that_the_live_optimizer_makes(edit, told):
    packed = Packed.of(torch.ones(64))
    parts = tensor_subclasses.opened({"momentum": packed})
    found = tensor_subclasses.closed(parts, {tensor_subclasses.name_of(Packed): Packed}.get, "parameter 0")
    same_state(found, {"momentum": packed}, "there and back")
    mark = json.loads(parts["momentum"][tensor_subclasses.MARK])
    parts["momentum"][tensor_subclasses.MARK] = json.dumps(mark | edit)
    with pytest.raises(ValueError, match=told):
        tensor_subclasses.closed(parts, {tensor_subclasses.name_of(Packed): Packed}.get, "parameter 0")


def test_a_subclass_inside_a_subclass_is_carried_too():
    outer = Packed(Packed.of(torch.arange(64.0)), torch.ones(1), torch.float32)  # type: ignore[arg-type]
    parts = tensor_subclasses.opened([outer])
    assert set(parts[0]["codes"]) == {"codes", "scale", tensor_subclasses.MARK}
    (found,) = tensor_subclasses.closed(parts, {tensor_subclasses.name_of(Packed): Packed}.get, "parameter 0")
    assert torch.equal(found.codes.codes, outer.codes.codes)
    assert list(tensor_subclasses.classes_in(outer)) == [Packed, Packed]


class Nested(PackedMomentum):
    """Keeps its packed momentum in a list in a dict."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for state in self.state.values():
            state["momentum"] = state.pop("box")["items"][0]
        super().step()
        for state in self.state.values():
            state["box"] = {"items": [state.pop("momentum"), torch.ones(100)]}


def nested(rank: int, world_size: int, directory: Path) -> None:
    ours, theirs = parameters(SHAPES, torch.float32), parameters(SHAPES, torch.float32)
    opt, plain = ZeroRedundancyOptimizer(ours, Nested), Nested(theirs)
    train(opt, ours, range(2))
    train(plain, theirs, range(2))
    checkpoint.save(directory / "nested", opt)
    start = values_of(theirs)
    forms = Nested(parameters(SHAPES, torch.float32)), plain.state_dict()
    torch.save(forms[1], directory / f"{rank}.state")
    for source in ("checkpoint", "dict"):
        again = [torch.nn.Parameter(value.clone()) for value in start]
        fresh = ZeroRedundancyOptimizer(again, Nested)
        if source == "checkpoint":
            checkpoint.load(directory / "nested", fresh)
        else:
            fresh.load_state_dict(torch.load(directory / f"{rank}.state", weights_only=True))
        train(fresh, again, range(2, 4))
        oracle = [torch.nn.Parameter(value.clone()) for value in start]
        other = Nested(oracle)
        other.load_state_dict(torch.load(directory / f"{rank}.state", weights_only=True))
        train(other, oracle, range(2, 4))
        same_state(values_of(again), values_of(oracle), source)


def test_a_subclass_in_a_list_in_a_dict_is_carried_too(tmp_path):
    run_ranks(nested, 2, tmp_path)


def test_a_plain_optimizer_that_was_built_with_other_arguments_loads_what_it_saved(tmp_path):
    """torchao keeps the size of a block for itself: neither its defaults nor its groups tell it."""
    pytest.importorskip("torchao")
    shape = (129, 32)  # 4128 elements: whole blocks of 32, not of 256
    kind = optimizer_class("AdamW8bit")
    params = parameters([shape], torch.float32)
    optimizer = kind(params, block_size=32)
    train(optimizer, params, range(2))
    checkpoint.save(tmp_path / "x", optimizer)
    fresh = kind(parameters([shape], torch.float32), block_size=32)
    checkpoint.load(tmp_path / "x", fresh)
    same_state(fresh.state_dict()["state"], optimizer.state_dict()["state"], "loaded")
    other = torch.optim.AdamW(parameters([shape], torch.float32))
    with pytest.raises(ValueError, match="OptimState8bit"):
        checkpoint.load(tmp_path / "x", other)
    assert not other.state

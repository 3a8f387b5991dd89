"""State that is a tensor subclass, such as quantized moments: beyond what the harness says with its "Packed"."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD

from shardstep import ZeroRedundancyOptimizer, checkpoint, cli
from shardstep.state import subclasses
from tests.differential.configurations import Packed
from tests.differential.eight_bits import EightBits
from tests.harness import run_ranks
from tests.oracle import assert_same, error_of, parameters, train, values_of

SHAPES = [(64, 64), (33,), (128, 64), (4096,), (5, 7)]


class Nested(Packed):
    """Keeps its packed momentum in a list in a dict."""

    def update(self, group, used):
        for state in self.state.values():
            state["momentum"] = state.pop("box")["items"][0]
        super().update(group, used)
        for state in self.state.values():
            state["box"] = {"items": [state.pop("momentum"), torch.ones(100)]}


def optimizer_class(name):
    if name in ("Packed", "Nested"):
        return {"Packed": Packed, "Nested": Nested}[name]
    torch.compiler.set_stance("force_eager")  # torchao compiles its step, half a minute for each shape
    import torchao.optim

    return getattr(torchao.optim, name)


def plain_tensors(value):
    """A tree in which tensor subclasses are what they consist of, with their class. (Not by the code under test.)"""
    if isinstance(value, dict):
        return {key: plain_tensors(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_tensors(item) for item in value]
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        return {"class": type(value).__name__, "context": str(context)} | {name: getattr(value, name) for name in names}
    return value


def _carried(rank, world, name, folder):
    kind = optimizer_class(name)
    ours, theirs = parameters(SHAPES, torch.float32), parameters(SHAPES, torch.float32)
    opt, plain = ZeroRedundancyOptimizer(ours, kind, lr=0.01), kind(theirs, lr=0.01)
    train(opt, ours, range(3))
    train(plain, theirs, range(3))
    checkpoint.save(folder / "saved", opt)
    opt.consolidate_state_dict()
    if rank == 0:
        assert_same(plain_tensors(opt.state_dict()["state"]), plain_tensors(plain.state_dict()["state"]), "state_dict")
        assert cli.main(["convert", str(folder / "saved"), str(folder / "file")]) == 0
        assert cli.main(["convert", str(folder / "file"), str(folder / "back")]) == 0
    dist.barrier()
    start = values_of(theirs)
    train(plain, theirs, range(3, 6))
    for source in ("saved", "file", "back", "saved, plain"):
        again = [torch.nn.Parameter(value.clone()) for value in start]
        # A plain one, new, has made no state yet that tells the class.
        fresh = kind(again, lr=0.01) if "plain" in source else ZeroRedundancyOptimizer(again, kind, lr=0.01)
        if source == "file":
            fresh.load_state_dict(torch.load(folder / source, weights_only=True))
        else:
            checkpoint.load(folder / source.split(",")[0], fresh)
        train(fresh, again, range(3, 6))
        assert_same(values_of(again), values_of(theirs), source)


TORCHAO = [pytest.param(name, marks=pytest.mark.extra) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")]


@pytest.mark.parametrize("name", ["Packed", "Nested", *TORCHAO])
def test_subclass_state_goes_through_conversions_and_training_goes_on(name, tmp_path):
    if name.startswith("AdamW"):
        pytest.importorskip("torchao")
    run_ranks(_carried, 2, name, tmp_path, timeout=170)


def _refused(rank, world, folder):
    params = parameters(SHAPES, torch.float32)
    opt = ZeroRedundancyOptimizer(params, Packed)
    train(opt, params, range(2))
    checkpoint.save(folder / "packed", opt)
    for other in (
        ZeroRedundancyOptimizer(parameters(SHAPES, torch.float32), SGD, lr=0.1, momentum=0.9),
        ZeroRedundancyOptimizer(parameters(SHAPES, torch.float32), SGD, lr=0.1, shard="tensor"),
        SGD(parameters(SHAPES, torch.float32), lr=0.1),
    ):
        error = error_of(lambda other=other: checkpoint.load(folder / "packed", other))
        assert isinstance(error, (ValueError, RuntimeError))
        assert "EightBits" in str(error) or "cannot be cut" in str(error)
        assert not any(other.state.values()), "nothing was changed"


def test_subclass_state_is_not_loaded_into_an_optimizer_that_does_not_make_it(tmp_path):
    run_ranks(_refused, 2, tmp_path)


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
    parts = subclasses.opened({"momentum": EightBits.of(torch.ones(64))})
    mark = json.loads(parts["momentum"][subclasses.MARK])
    parts["momentum"][subclasses.MARK] = json.dumps(mark | edit)
    with pytest.raises(ValueError, match=told):
        subclasses.closed(parts, {subclasses.name_of(EightBits): EightBits}.get, "parameter 0")


@pytest.mark.long
def test_a_file_is_converted_with_the_module_of_its_class_imported_and_refused_without(tmp_path):
    """In processes of their own: the class is known only where it was imported."""
    params = parameters(SHAPES, torch.float32)
    plain = Packed(params)
    train(plain, params, range(2))
    torch.save(plain.state_dict(), tmp_path / "file")

    def convert(*more):
        command = [sys.executable, "-m", "shardstep", "convert", tmp_path / "file", tmp_path / "saved", *more]
        return subprocess.run(command, capture_output=True, text=True)

    done = convert()
    assert done.returncode == 1
    assert "it holds tests.differential.eight_bits.EightBits, which is not plain data" in done.stderr
    assert "--import" not in done.stderr  # only a module of an installed package is worth it
    assert convert("--import", "no.such.module").returncode == 2
    done = convert("--import", "tests.differential.eight_bits")
    assert done.returncode == 0, done.stderr
    fresh = Packed(parameters(SHAPES, torch.float32))
    checkpoint.load(tmp_path / "saved", fresh)
    assert_same(plain_tensors(fresh.state_dict()["state"]), plain_tensors(plain.state_dict()["state"]), "converted")

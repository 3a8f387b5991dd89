"""Checkpoints and the world around them: DCP, FSDP2, meshes, wrapped models, one process without a process group.

That training goes on from a checkpoint in any mode, at any number of ranks, is a claim of ``tests/differential``.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from shardstep import ZeroRedundancyOptimizer, checkpoint
from shardstep.checkpoint import CheckpointError
from tests.checkpoints import SMALL, Weights, everything_in, once, plain, sharded, step
from tests.harness import run_ranks
from tests.meshes import mesh_of
from tests.oracle import assert_same
from tests.twins import values

EXTRA = {"step": 3, "lists": [1, 2.5, "a"], "deep": {"pair": (1, 2), "none": None}, "rng": torch.arange(9)}
MODES: tuple[dict[str, Any], ...] = ({"shard": "element"}, {"shard": "tensor"}, {"shard_gradients": True})


def unlike(model: Weights | None = None, **options: Any) -> tuple[Weights, ZeroRedundancyOptimizer]:
    """A new program as it is before it loads: other weights, other options. None of them may survive."""
    model, optimizer = sharded(0, model, **options)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(7)
    optimizer.param_groups[0].update(lr=7.0, weight_decay=0.7)
    return model, optimizer


def check(model: nn.Module, optimizer: Any, steps: int, claim: str = "") -> None:
    """Weights, state and options are those of the plain optimizer after so many steps. Collective."""
    assert_same(everything_in(model, optimizer), everything_in(*plain(steps)), claim)


# --- torch's own tools ------------------------------------------------------------------------------------------------


def save_thrice(rank: int, world: int, root: Path) -> None:
    """The same state by us, by DCP with our sharded dict, by DCP with torch's get_optimizer_state_dict."""
    model, optimizer = sharded(3)
    checkpoint.save(root / "own", optimizer, model, extra={**EXTRA, "rank": rank})
    form = {"model": model.state_dict(), "optim": optimizer.sharded_state_dict(model)}
    dcp.save(form, checkpoint_id=root / "sharded dict")
    form = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(form, checkpoint_id=root / "torch's dict")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    return once(tmp_path_factory, worker_id, "saved", lambda root: run_ranks(save_thrice, 3, root) and None)


SAVED = ("own", "sharded dict", "torch's dict")


@pytest.mark.parametrize("name", SAVED)
def test_torchs_own_tool_finds_the_plain_state_by_name(saved, name, tmp_path):
    """Keys, shapes, dtypes and values are those of one process: no padding, no rank, no world size."""
    dcp_to_torch_save(saved / name, tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    model, optimizer = plain(3)
    form, names = optimizer.state_dict(), [name for name, _ in model.named_parameters()]
    state = {names[index]: entry for index, entry in form["state"].items()}
    expected = {
        "model": dict(model.state_dict()),
        "optim": {"state": state, "param_groups": [{**form["param_groups"][0], "params": names}]},
    }
    assert_same(found, expected if name != "own" else {**expected, "extra": {**EXTRA, "rank": 0}}, name)


def load_all(rank: int, world: int, root: Path) -> None:
    for name, mode in zip(SAVED, MODES, strict=True):
        model, optimizer = unlike(**mode)
        extra = checkpoint.load(root / name, optimizer, model)
        assert_same(extra, {**EXTRA, "rank": 0} if name == "own" else {}, name)
        step(model, optimizer, range(3, 6))
        check(model, optimizer, 6, name)


def test_load_reads_what_was_saved_with_dcp_itself(saved):
    run_ranks(load_all, 2, saved)


def through_fsdp2(rank: int, world: int, root: Path) -> None:
    """Saved here, read and saved by a program with FSDP2, loaded here."""
    matrices = SMALL[:-1]  # FSDP2 takes no scalars
    model, optimizer = sharded(3, Weights(matrices))
    checkpoint.save(root / "ours", optimizer, model)
    expected = everything_in(model, optimizer)

    model = fully_shard(Weights(matrices), mesh=init_device_mesh("cpu", (world,)))
    optimizer = AdamW(model.parameters(), lr=0.7)
    form = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(form, checkpoint_id=root / "ours")
    model.load_state_dict(form["model"])
    set_optimizer_state_dict(model, optimizer, form["optim"])
    form = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(form, checkpoint_id=root / "theirs")

    model, optimizer = unlike(Weights(matrices), shard_gradients=True)
    checkpoint.load(root / "theirs", optimizer, model)
    assert_same(everything_in(model, optimizer), expected)


def test_an_fsdp2_program_loads_it_and_what_it_saves_is_loaded_by_ours(tmp_path):
    run_ranks(through_fsdp2, 3, tmp_path)


# --- ranks and meshes -------------------------------------------------------------------------------------------------

EQUAL = [(509, 64)] * 12


def save_equal(rank: int, world: int, path: Path, mesh: tuple[int, int] | None) -> None:
    checkpoint.save(path, sharded(1, Weights(EQUAL), **({"process_group": mesh_of(mesh)} if mesh else {}))[1])


def load_equal(rank: int, world: int, path: Path) -> int:
    """How many bytes this rank has read."""
    _, optimizer = sharded(0, Weights(EQUAL))
    before = bytes_read()
    checkpoint.load(path, optimizer)
    return bytes_read() - before


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.mark.parametrize("mesh", [None, (2, 2)])
def test_every_element_is_written_once_each_rank_writes_its_part_and_reads_its_part(mesh, tmp_path):
    path = tmp_path / "c"
    run_ranks(save_equal, 4, path, mesh)
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    for key, entry in ((key, entry) for key, entry in entries.items() if hasattr(entry, "chunks")):
        written = torch.zeros(entry.size, dtype=torch.int64)
        for chunk in entry.chunks:
            written[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
        assert bool((written == 1).all()), key
    sizes = [file.stat().st_size for file in path.glob("*.distcp")]
    assert len(sizes) == 4
    assert max(sizes) < 1.2 * sum(sizes) / 4, sizes  # (items have a head, and small ones stay whole)
    for count in run_ranks(load_equal, 2, path):
        # Its part, and a share of the files to check them.
        assert 0.8 * sum(sizes) < count < 1.2 * sum(sizes), f"{count} bytes of {sum(sizes)}"


# --- models -----------------------------------------------------------------------------------------------------------

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp of compiled": lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
    "compiled ddp": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
}


def wrapped(rank: int, world: int, root: Path) -> None:
    """Names are those of the plain module, whichever wrapper is given to save and to load."""
    for name, wrap in WRAPPERS.items():
        model, optimizer = sharded(3)
        checkpoint.save(root / name, optimizer, wrap(model))
        for into in (lambda model: model, wrap):
            model, optimizer = unlike()
            checkpoint.load(root / name, optimizer, into(model))
            check(model, optimizer, 3, name)


def test_wrappers_leave_no_trace_in_the_names(tmp_path):
    run_ranks(wrapped, 2, tmp_path)


class Talkative(Weights):
    """A module with extra state, as torch's modules may have: anything. It may refuse to load."""

    seen: Any = 0
    refuses = False

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        if self.refuses:
            raise ValueError("not today")
        self.seen = state


def extra_state(rank: int, world: int, root: Path) -> None:
    for seen in ({"epochs": 3, "names": ["a", "b"], "table": torch.arange(3)}, torch.arange(4), 7):
        model, optimizer = sharded(1, Talkative())
        model.seen = seen
        checkpoint.save(root / "c", optimizer, model)
        model, optimizer = unlike(Talkative())
        model.seen = torch.zeros_like(seen) if isinstance(seen, Tensor) else type(seen)()
        checkpoint.load(root / "c", optimizer, model)
        assert_same(model.seen, seen)
    # One rank's model refuses: the optimizer is not changed anywhere.
    model, optimizer = unlike(Talkative())
    model.refuses, before = rank == 1, everything_in(model, optimizer)
    with pytest.raises((ValueError, RuntimeError)):
        checkpoint.load(root / "c", optimizer, model)
    assert_same(everything_in(model, optimizer)[1:], before[1:])


def test_the_extra_state_of_modules_is_kept_and_one_that_refuses_leaves_the_optimizer_as_it_was(tmp_path):
    run_ranks(extra_state, 2, tmp_path)


def to_other_dtypes(rank: int, world: int, path: Path, expected: dict[torch.dtype, Any]) -> None:
    for dtype, mode in itertools.product(expected, MODES):
        model, optimizer = unlike(Weights().to(dtype), **mode)
        checkpoint.load(path, optimizer, model)
        assert_same(everything_in(model, optimizer), expected[dtype], f"{mode} {dtype}")


def test_a_checkpoint_loads_into_parameters_of_another_dtype_as_into_the_plain_optimizer(saved):
    (model, optimizer), expected = plain(3), {}
    for dtype in (torch.float32, torch.bfloat16):
        other, oracle = plain(0, Weights().to(dtype))
        other.load_state_dict(model.state_dict())
        oracle.load_state_dict(optimizer.state_dict())
        expected[dtype] = everything_in(other, oracle)
    run_ranks(to_other_dtypes, 2, saved / "own", expected)


# --- many tensors, several optimizers ---------------------------------------------------------------------------------


def save_many(rank: int, world: int, path: Path) -> None:
    """What the ranks tell each other is more than a value of the key-value store may be (8 MiB)."""
    names = [f"w{number}" + "x" * 3000 for number in range(1500)]
    model = nn.ParameterDict({name: torch.full((3,), float(number)) for number, name in enumerate(names)})
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    expected = {name: param.detach().clone() for name, param in model.items()}
    checkpoint.save(path, optimizer, model)
    optimizer.step()
    checkpoint.load(path, optimizer, model)
    assert_same(dict(model.state_dict()), expected)
    assert optimizer.full_state(model[names[-1]])["step"] == 1


def test_the_ranks_send_nothing_large_through_the_store(tmp_path):
    run_ranks(save_many, 2, tmp_path / "c")


def two_optimizers(model: Weights, lr: float, in_a_dict: bool, second: Callable[..., Any]) -> tuple[Any, list[Any]]:
    """As they are given, and in a list."""
    params = list(model.parameters())
    first = ZeroRedundancyOptimizer(params[:2], torch.optim.SGD, lr=lr, momentum=0.9)
    optimizers = [first, second(params[2:], lr=lr)]
    return dict(zip("ab", optimizers, strict=True)) if in_a_dict else optimizers, optimizers


def save_two_optimizers(rank: int, world: int, root: Path) -> None:
    """In a list and in a dict, and once in the background; the second one may be plain: all ranks step it alike."""
    kinds = (functools.partial(ZeroRedundancyOptimizer, optimizer_class=AdamW), AdamW)
    for number, (in_a_dict, kind) in enumerate(itertools.product((False, True), kinds)):
        model, path = Weights(), root / str(number)
        given, optimizers = two_optimizers(model, 0.1, in_a_dict, kind)
        for param in model.parameters():
            param.grad = param.detach().sin()
        for optimizer in optimizers:
            optimizer.step()
        expected = [everything_in(model, optimizer) for optimizer in optimizers]
        checkpoint.save(path, given, model, {"step": 1}, asynchronous=True)
        checkpoint.save(path, given, model, {"step": 2})
        fresh = Weights()
        given, optimizers = two_optimizers(fresh, 7.0, in_a_dict, kind)
        assert checkpoint.resume(root, given, fresh) == (path, {"step": 2})
        assert_same([everything_in(fresh, optimizer) for optimizer in optimizers], expected)
        with pytest.raises(CheckpointError, match="has no optimizer under 'optim'"):  # not as it was saved
            checkpoint.load(path, optimizers[0], fresh)


def test_several_optimizers_are_one_checkpoint(tmp_path):
    run_ranks(save_two_optimizers, 2, tmp_path)


def test_the_model_is_exported_to_safetensors_also_from_masters(saved, tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    checkpoint.export_model(saved / "own", tmp_path / "m.safetensors")
    assert_same(load_file(tmp_path / "m.safetensors"), dict(plain(3)[0].state_dict()))
    assert os.listdir(tmp_path) == ["m.safetensors"]
    model = Weights().bfloat16()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.1, master_weights=torch.float32)
    step(model, optimizer, range(2))
    checkpoint.save(tmp_path / "c", optimizer, model)
    checkpoint.export_model(tmp_path / "c", tmp_path / "m.safetensors", master=True)
    found = load_file(tmp_path / "m.safetensors")
    masters = {name: optimizer.full_state(param)["master_weight"] for name, param in model.named_parameters()}
    assert_same(found, {**masters, "count": model.count})


# --- one process, without a process group -----------------------------------------------------------------------------

SCHEDULERS = {
    "steps": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_extra_comes_back_as_it_was(asynchronous, tmp_path):
    _, optimizer = plain(1)
    extra: dict[str, Any] = {
        "numbers as keys": {1: 2.0, 2: {3: 4}},
        "nothing": {},
        "lists": [{"b": 1}, {}, []],
        "empty first": [{}, {"b": 1}],
        "tensors": {"deep": {"er": [torch.ones(2), {"x": torch.zeros(1), "y": 5}]}},
        "a tuple": (torch.ones(1), 2),
        "counter": Counter([1, 1, 2]),
        "ordered": OrderedDict(x=1),
        "optimizer": optimizer.state_dict(),
        "text": "ü",
        "none": None,
    } | {name: make(optimizer).state_dict() for name, make in SCHEDULERS.items()}
    told = {key: (type(value), str(value)) for key, value in extra.items()}
    checkpoint.save(tmp_path / "c", optimizer, extra=extra, asynchronous=asynchronous).wait()
    for found in (checkpoint.load(tmp_path / "c", optimizer), checkpoint.load_extra(tmp_path / "c")):
        assert {key: (type(value), str(value)) for key, value in found.items()} == told


def test_the_model_alone_is_read_where_no_process_group_is(saved):
    assert not dist.is_initialized()
    expected = dict(plain(3)[0].state_dict())
    model = Weights()
    checkpoint.load_model(saved / "own", model)
    assert_same(dict(model.state_dict()), expected)
    expected["w3"] = values((14,), 1)
    model = Weights()
    model.w3 = nn.Parameter(expected["w3"].clone())
    with pytest.warns(UserWarning, match="does not match"):
        checkpoint.load_model(saved / "own", model, strict=False)
    assert_same(dict(model.state_dict()), expected)


def test_a_checkpoint_without_a_model_leaves_the_model_and_says_so(tmp_path):
    model = Weights()
    checkpoint.save(tmp_path / "c", AdamW(model.named_parameters()))
    with pytest.warns(UserWarning, match="holds no model"):
        checkpoint.load(tmp_path / "c", AdamW(model.named_parameters()), model)
    assert_same(dict(model.state_dict()), dict(Weights().state_dict()))

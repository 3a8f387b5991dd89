"""Checkpoints and the world around them: DCP, FSDP2, meshes, wrapped models, one process without a process group.

That training goes on from a checkpoint in any mode, at any number of ranks, is a claim of ``tests/differential``.

Oracle: one process with the plain optimizer, never interrupted. Every rank has the same gradients, multiples of
1/4 with few bits: their mean over any number of ranks is exact, so that everything is compared bit by bit.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from filelock import FileLock
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.harness import run_ranks
from tests.meshes import mesh_of
from tests.oracle import assert_same
from tests.versions import needs_copies_of_async_save

LIMITS = {"timeout": 80, "pg_timeout": 30}
SAVED_AT, END = 3, 6  # steps
MODES: dict[str, dict[str, Any]] = {
    "element": {"shard": "element"},
    "tensor": {"shard": "tensor"},
    "zero2": {"shard_gradients": True},
}
EXTRA = {"step": SAVED_AT, "lists": [1, 2.5, "a"], "deep": {"pair": (1, 2), "none": None}, "rng": torch.arange(9)}


def noise(shape: Iterable[int], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Graded(nn.Module):
    """A model whose loss gives its parameters any gradients one likes. ``forward`` is the loss of a step."""

    def forward(self, step: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for position, (_, param) in enumerate(sorted(self.named_parameters())):
            if param.requires_grad:
                gradient = (noise(param.shape, 1000 * step + position) * 4).round() / 4
                total = total + (param * gradient.to(param.dtype)).sum().double()
        return total


class Zoo(Graded):
    """Every kind of parameter: cut into boxes, small, scalar, empty, channels_last, bf16, frozen, tied. And buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.embed = Parameter(noise((61, 37), seed))
        self.deep = Parameter(noise((7, 5, 3, 11), seed + 1))
        self.bias = Parameter(noise((13,), seed + 2))
        self.scale = Parameter(noise((), seed + 3))
        self.nothing = Parameter(noise((0, 4), seed + 4))
        self.conv = Parameter(noise((6, 4, 3, 2), seed + 5).to(memory_format=torch.channels_last))
        self.brief = Parameter(noise((57, 31), seed + 6, torch.bfloat16))
        self.frozen = Parameter(noise((5, 3), seed + 7), requires_grad=False)
        self.head = self.embed
        self.register_buffer("mean", noise((4,), seed + 8))
        self.register_buffer("count", torch.tensor(seed))


class Simple(Graded):
    """What FSDP2 takes, too."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(*sizes, dtype=torch.float64) for sizes in ((37, 61), (23, 19)))
        with torch.no_grad():
            for position, param in enumerate(self.parameters()):
                param.copy_(noise(param.shape, seed + position))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    half = len(params) // 2
    empty = [{"params": [], "lr": 0.5}] if isinstance(model, Zoo) else []
    return [{"params": params[:half], "weight_decay": 0.1}, *empty, {"params": params[half:], "lr": 0.03}]


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
        for buffer in model.buffers():
            buffer.add_(step)


def plain(make: Callable[..., nn.Module] = Zoo, optimizer_class: Any = AdamW, **options: Any) -> tuple[Any, Any]:
    model = make()
    return model, optimizer_class(groups_of(model), **{"lr": 0.01, **options})


def sharded(
    mode: str, make: Callable[..., nn.Module] = Zoo, optimizer_class: Any = AdamW, seed: int = 0, **options: Any
) -> tuple[Any, Any]:
    model = make(seed)
    options = {"lr": 0.01, **MODES[mode], **options}
    return model, ZeroRedundancyOptimizer(groups_of(model), optimizer_class, **options)


def unlike(mode: str, make: Callable[..., nn.Module] = Zoo, **options: Any) -> tuple[Any, Any]:
    """A new program as it is before it loads: other weights, other options. None of them may survive."""
    model, optimizer = sharded(mode, make, seed=500, **options)
    for group in optimizer.param_groups:
        group["lr"] *= 7
    return model, optimizer


def check(model: nn.Module, optimizer: ZeroRedundancyOptimizer, expected: dict[str, Any], claim: str) -> None:
    """The weights on every rank, and the state, are those of the plain optimizer. Bits."""
    assert_same(dict(model.state_dict()), expected["model"], claim)
    optimizer.consolidate_state_dict(to=0)
    if optimizer.rank == 0:
        assert_same(optimizer.state_dict(), expected["optim"], claim)


def photo(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {"model": dict(model.state_dict()), "optim": optimizer.state_dict()}


def uninterrupted(make: Callable[..., nn.Module] = Zoo, optimizer_class: Any = AdamW, **options: Any) -> dict[int, Any]:
    """What the plain optimizer has when the checkpoint is saved and at the end."""
    photos = {}
    for stop in (SAVED_AT, END):
        model, optimizer = plain(make, optimizer_class, **options)
        train(model, optimizer, range(stop))
        photos[stop] = photo(model, optimizer)
    return photos


def once(tmp_path_factory: pytest.TempPathFactory, worker_id: str, name: str, build: Callable[[Path], None]) -> Path:
    """A directory that is built by one of pytest's workers and read by all."""
    if worker_id == "master":
        root = tmp_path_factory.mktemp(name)
        build(root)
        return root
    root = tmp_path_factory.getbasetemp().parent / name
    with FileLock(f"{root}.lock"):
        if not root.exists():
            aside = tmp_path_factory.mktemp(name)
            build(aside)
            aside.rename(root)
    return root


# --- torch's own tools ------------------------------------------------------------------------------------------------


def save_zoo(rank: int, world: int, root: Path) -> None:
    """The same state three times: by us, by DCP with our sharded dict, by DCP with torch's get_optimizer_state_dict."""
    model, optimizer = sharded("zero2")
    train(model, optimizer, range(SAVED_AT))
    checkpoint.save(root / "own", optimizer, model, extra={**EXTRA, "rank": rank})
    form = {"model": model.state_dict(), "optim": optimizer.sharded_state_dict(model)}
    dcp.save(form, checkpoint_id=root / "sharded dict")
    form = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(form, checkpoint_id=root / "torch's dict")


def build_zoo(root: Path) -> None:
    torch.save(uninterrupted(), root / "expected.pt")
    run_ranks(save_zoo, 3, root, **LIMITS)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    return once(tmp_path_factory, worker_id, "zoo", build_zoo)


SAVED = ("own", "sharded dict", "torch's dict")


def by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """A plain optimizer's state dict with names for numbers, nothing else changed."""
    names = {param: name for name, param in model.named_parameters()}
    ordered = [names[param] for group in optimizer.param_groups for param in group["params"]]
    form = optimizer.state_dict()
    return {
        "state": {ordered[index]: entry for index, entry in form["state"].items()},
        "param_groups": [{**group, "params": [ordered[i] for i in group["params"]]} for group in form["param_groups"]],
    }


@pytest.mark.parametrize("name", SAVED)
def test_torchs_own_tool_finds_the_plain_state_by_name(zoo, name, tmp_path):
    """Keys, shapes, dtypes and values are those of one process: no padding, no rank, no world size."""
    dcp_to_torch_save(zoo / name, tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    model, optimizer = plain()
    train(model, optimizer, range(SAVED_AT))
    expected = {"model": dict(model.state_dict()), "optim": by_name(model, optimizer)}
    if name == "own":
        expected["extra"] = {**EXTRA, "rank": 0}
    assert_same(found, expected, name)
    model, optimizer = plain(partial(Zoo, 500), lr=0.7)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optim"])  # names in the place of numbers
    train(model, optimizer, range(SAVED_AT, END))
    assert_same(photo(model, optimizer), torch.load(zoo / "expected.pt")[END])


def load_all(rank: int, world: int, root: Path) -> None:
    expected = torch.load(root / "expected.pt")
    for name, mode in zip(SAVED, MODES, strict=True):
        model, optimizer = unlike(mode)
        extra = checkpoint.load(root / name, optimizer, model)
        assert_same(extra, {**EXTRA, "rank": 0} if name == "own" else {}, name)
        check(model, optimizer, expected[SAVED_AT], name)
        train(model, optimizer, range(SAVED_AT, END))
        check(model, optimizer, expected[END], f"{name}, trained")


def test_load_reads_what_was_saved_with_dcp_itself(zoo):
    run_ranks(load_all, 2, zoo, **LIMITS)


def into_dtensors(rank: int, world: int, root: Path) -> None:
    """Plain dcp.load into DTensors, as an FSDP2 user has them, sharded in any dimension or replicated."""
    mesh = init_device_mesh("cpu", (world,))
    state = torch.load(root / "expected.pt")[SAVED_AT]["optim"]["state"]
    index = {"embed": 0, "deep": 1, "brief": 6}
    readers = {
        "torch's": lambda path: {"checkpoint_id": path},
        "ours": lambda path: {"storage_reader": checkpoint.Reader(path), "planner": checkpoint.SafeLoadPlanner()},
    }
    for placement, (reader, given) in itertools.product((Shard(0), Shard(1), Replicate()), readers.items()):
        template = {
            param: {"exp_avg": distribute_tensor(torch.zeros_like(state[number]["exp_avg"]), mesh, [placement])}
            for param, number in index.items()
        }
        dcp.load({"optim": {"state": template}}, **given(root / "own"))
        for param, number in index.items():
            found = template[param]["exp_avg"].full_tensor()
            assert_same(found, state[number]["exp_avg"], f"{placement}, {reader} reader, {param}")


def test_dtensors_read_it_with_dcp_through_torchs_reader_and_ours(zoo):
    run_ranks(into_dtensors, 2, zoo, **LIMITS)


def through_fsdp2(rank: int, world: int, root: Path) -> None:
    """Saved here, read and saved by a program with FSDP2, loaded here."""
    expected = uninterrupted(Simple)
    model, optimizer = sharded("element", Simple)
    train(model, optimizer, range(SAVED_AT))
    checkpoint.save(root / "ours", optimizer, model)

    model = Simple(500)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = AdamW(groups_of(model), lr=0.7)
    form = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(form, checkpoint_id=root / "ours")
    model.load_state_dict(form["model"])
    set_optimizer_state_dict(model, optimizer, form["optim"])
    form = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(form, checkpoint_id=root / "theirs")

    model, optimizer = unlike("zero2", Simple)
    checkpoint.load(root / "theirs", optimizer, model)
    train(model, optimizer, range(SAVED_AT, END))
    check(model, optimizer, expected[END], "from FSDP2")


def test_an_fsdp2_program_loads_it_and_what_it_saves_is_loaded_by_ours(tmp_path):
    run_ranks(through_fsdp2, 3, tmp_path, **LIMITS)


def save_asynchronously_with_dcp(rank: int, world: int, root: Path) -> None:
    for mode in MODES:
        model, optimizer = sharded(mode, Simple)
        train(model, optimizer, range(SAVED_AT))
        form = {"model": model.state_dict(), "optim": optimizer.sharded_state_dict(model)}
        saving = dcp.async_save(form, checkpoint_id=root / mode)
        train(model, optimizer, range(SAVED_AT, END))  # meanwhile
        saving.result()


@needs_copies_of_async_save
def test_dcps_own_async_save_keeps_the_state_of_the_call(tmp_path):
    run_ranks(save_asynchronously_with_dcp, 2, tmp_path, **LIMITS)
    for mode in MODES:
        model, optimizer = plain(partial(Simple, 500))
        checkpoint.load(tmp_path / mode, optimizer, model)
        assert_same(photo(model, optimizer), uninterrupted(Simple)[SAVED_AT], mode)


def looking_changes_nothing(rank: int, world: int) -> None:
    """sharded_state_dict of an optimizer that never stepped: no phantom step, no state, no gradient."""
    for mode, kind in itertools.product(MODES, (AdamW, Adagrad, SGD)):
        model, optimizer = sharded(mode, Simple, kind)
        steps: list[Any] = []
        optimizer.register_step_pre_hook(lambda *args, steps=steps: steps.append(1))
        form = optimizer.sharded_state_dict(model)
        assert set(form["state"]) == {name for name, _ in model.named_parameters()}
        optimizer.load_sharded_state_dict(form, model)  # nothing was loaded into it
        assert not steps
        assert all(param.grad is None for param in model.parameters())
        check(model, optimizer, photo(*plain(Simple, kind)), f"{mode} {kind.__name__}")


def test_a_sharded_state_dict_of_a_new_optimizer_changes_nothing_and_loads_as_nothing():
    run_ranks(looking_changes_nothing, 2, **LIMITS)


# --- groups and meshes ------------------------------------------------------------------------------------------------


def in_subgroups(rank: int, world: int, root: Path, expected: dict[int, Any]) -> None:
    """Two halves of the job each have an optimizer and a checkpoint of their own, at the same time."""
    halves = [dist.new_group([3, 1]), dist.new_group([0, 2, 4])]
    mine, directory = halves[rank % 2 == 0], root / f"half{rank % 2}"
    model, optimizer = sharded("zero2", Simple, process_group=mine)
    train(model, optimizer, range(SAVED_AT))
    checkpoint.save(directory, optimizer, model)
    model, optimizer = sharded("element", Simple, process_group=mine, seed=500)
    checkpoint.load(directory, optimizer, model)
    train(model, optimizer, range(SAVED_AT, END))
    check(model, optimizer, expected[END], "in a sub-group")


def test_subgroups_save_and_load_for_themselves(tmp_path):
    run_ranks(in_subgroups, 5, tmp_path, uninterrupted(Simple), **LIMITS)


def save_large(rank: int, world: int, path: Path, mesh: tuple[int, int] | None) -> None:
    model = nn.ParameterList(noise((509, 64), number) for number in range(12))
    group = {"process_group": mesh_of(mesh)} if mesh else {}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01, **group)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    checkpoint.save(path, optimizer)


def load_large(rank: int, world: int, path: Path) -> int:
    """How many bytes this rank has read."""
    model = nn.ParameterList(torch.zeros(509, 64, dtype=torch.float64) for _ in range(12))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01)
    before = bytes_read()
    checkpoint.load(path, optimizer)
    return bytes_read() - before


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.mark.parametrize("mesh", [None, (2, 2)])
def test_every_element_is_written_once_each_rank_writes_its_part_and_reads_its_part(mesh, tmp_path):
    path = tmp_path / "c"
    run_ranks(save_large, 4, path, mesh, **LIMITS)
    metadata = dcp.FileSystemReader(path).read_metadata()
    for key, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "chunks"):
            written = torch.zeros(entry.size, dtype=torch.int64)
            for chunk in entry.chunks:
                written[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
            assert bool((written == 1).all()), key
    sizes = [file.stat().st_size for file in path.glob("*.distcp")]
    assert len(sizes) == 4
    assert max(sizes) < 1.2 * sum(sizes) / 4, sizes  # (items have a head, and small ones stay whole)
    for count in run_ranks(load_large, 2, path, **LIMITS):
        assert 0.4 * sum(sizes) < count < 0.7 * sum(sizes), f"{count} bytes of {sum(sizes)}"


# --- models -----------------------------------------------------------------------------------------------------------


def wrapped(rank: int, world: int, root: Path, expected: dict[int, Any]) -> None:
    """Names are those of the plain module, whichever wrapper is given to save and to load."""
    wrap: dict[str, Callable[[nn.Module], nn.Module]] = {
        "compiled": lambda model: torch.compile(model, backend="eager"),
        "ddp of compiled": lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
        "compiled ddp": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
    }
    for name, outside in wrap.items():
        model = Simple()
        optimizer = ZeroRedundancyOptimizer(groups_of(outer := outside(model)), AdamW, lr=0.01)
        train(model, optimizer, range(SAVED_AT))
        checkpoint.save(root / name, optimizer, outer)
        for into in (lambda model: model, outside):
            model = Simple(500)
            optimizer = ZeroRedundancyOptimizer(groups_of(outer := into(model)), AdamW, lr=0.01)
            checkpoint.load(root / name, optimizer, outer)
            check(model, optimizer, expected[SAVED_AT], name)


def test_wrappers_leave_no_trace_in_the_names(tmp_path):
    run_ranks(wrapped, 2, tmp_path, uninterrupted(Simple), **LIMITS)


class Talkative(Simple):
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
        model, optimizer = sharded("element", Talkative)
        model.seen = seen
        train(model, optimizer, range(1))
        checkpoint.save(root / "c", optimizer, model)
        model, optimizer = sharded("tensor", Talkative, seed=500)
        model.seen = torch.zeros_like(seen) if isinstance(seen, Tensor) else type(seen)()
        checkpoint.load(root / "c", optimizer, model)
        assert_same(model.seen, seen)
    # One rank's model refuses: neither it nor the optimizer is changed anywhere.
    model, optimizer = sharded("element", Talkative, seed=500)
    model.refuses, before = rank == 1, {name: value.clone() for name, value in model.named_parameters()}
    with pytest.raises((ValueError, RuntimeError)):
        checkpoint.load(root / "c", optimizer, model)
    assert_same({name: value.clone() for name, value in model.named_parameters()}, before, "the model was loaded")
    assert not any(optimizer.full_state(param) for param in model.parameters()), "the optimizer was loaded"


def test_the_extra_state_of_modules_is_kept_and_one_that_refuses_leaves_everything_as_it_was(tmp_path):
    run_ranks(extra_state, 2, tmp_path, **LIMITS)


def to_other_dtypes(rank: int, world: int, path: Path, expected: dict[torch.dtype, Any]) -> None:
    for dtype, mode in itertools.product(expected, MODES):
        model, optimizer = unlike(mode, lambda seed, dtype=dtype: Simple(seed).to(dtype))
        checkpoint.load(path, optimizer, model)
        check(model, optimizer, expected[dtype], f"{mode} {dtype}")


def test_a_checkpoint_loads_into_parameters_of_another_dtype_as_into_the_plain_optimizer(tmp_path):
    model, optimizer = plain(Simple)
    train(model, optimizer, range(SAVED_AT))
    checkpoint.save(tmp_path / "float64", optimizer, model)
    expected = {}
    for dtype in (torch.float32, torch.bfloat16):
        other, oracle = plain(lambda dtype=dtype: Simple(500).to(dtype))
        other.load_state_dict(model.state_dict())
        oracle.load_state_dict(optimizer.state_dict())
        expected[dtype] = photo(other, oracle)
    run_ranks(to_other_dtypes, 2, tmp_path / "float64", expected, **LIMITS)


# --- one process, without a process group -----------------------------------------------------------------------------

SCHEDULERS = {
    "steps": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_extra_comes_back_as_it_was(asynchronous, tmp_path):
    _, optimizer = plain(Simple, SGD, momentum=0.9)
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


def test_the_model_alone_is_read_where_no_process_group_is(zoo):
    assert not dist.is_initialized()
    model = Zoo(500)
    checkpoint.load_model(zoo / "own", model)
    assert_same(dict(model.state_dict()), torch.load(zoo / "expected.pt")[SAVED_AT]["model"])
    model.bias = Parameter(bias := noise((14,), 1))
    with pytest.warns(UserWarning, match="does not match"):
        checkpoint.load_model(zoo / "own", model, strict=False)
    assert_same(model.bias.detach(), bias)


def test_a_checkpoint_without_a_model_leaves_the_model_and_says_so(tmp_path):
    model = Simple()
    checkpoint.save(tmp_path / "c", AdamW(model.named_parameters()))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.warns(UserWarning, match="holds no model"):
        checkpoint.load(tmp_path / "c", AdamW(model.named_parameters()), model)
    assert_same(dict(model.state_dict()), before)
    assert checkpoint.load_extra(tmp_path / "c") == {}


def test_paths_are_those_of_the_call(tmp_path, monkeypatch):
    """A relative one, and the program changes its directory while it saves."""
    monkeypatch.chdir(tmp_path)
    model, optimizer = plain(Simple)
    handle = checkpoint.save("c", optimizer, model, asynchronous=True)
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
    assert handle.wait() == tmp_path / "c"
    assert checkpoint.latest("..") == tmp_path / "c"

"""Checkpoints: written by all ranks, read at any number of them, by the plain optimizer and by torch's own tools.

Oracle: one process with the plain optimizer, never interrupted. Every rank has the same gradients, multiples of
1/4 with few bits: their mean over any number of ranks is exact, so that everything is compared bit by bit.
"""

from __future__ import annotations

import io
import itertools
import os
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
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Optimizer

from shardstep import ZeroRedundancyOptimizer, checkpoint
from shardstep.checkpoint import Reader
from tests.harness import run_ranks
from tests.oracle import assert_same
from tests.versions import Muon, needs_copies_of_async_save, with_muon_if_there

LIMITS = {"timeout": 80, "pg_timeout": 30}
SAVED_AT, END = 3, 6  # steps
# How a sharded optimizer can be built. None is the plain one.
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
    model, optimizer = plain(make, optimizer_class, **options)
    photos = {}
    for start, stop in ((0, SAVED_AT), (SAVED_AT, END)):
        train(model, optimizer, range(start, stop))
        photos[stop] = torch.load(_bytes(photo(model, optimizer)), weights_only=True)
    return photos


def _bytes(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


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


# --- any number of ranks, any granularity, plain and sharded --------------------------------------------------------


def save_zoo(rank: int, world: int, root: Path, mode: str) -> None:
    """The same checkpoint three times: ours, DCP with our sharded dict, DCP with torch's get_optimizer_state_dict."""
    model, optimizer = sharded(mode)
    train(model, optimizer, range(SAVED_AT))
    handle = checkpoint.save(root / f"own-{mode}-{world}", optimizer, model, extra={**EXTRA, "rank": rank})
    assert handle.done()
    assert handle.wait() == root / f"own-{mode}-{world}"
    sharded_form = {"model": model.state_dict(), "optim": optimizer.sharded_state_dict(model)}
    dcp.save(sharded_form, checkpoint_id=root / f"dict-{mode}-{world}")
    torch_form = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(torch_form, checkpoint_id=root / f"torch-{mode}-{world}")
    train(model, optimizer, range(SAVED_AT, END))
    check(model, optimizer, torch.load(root / "expected.pt")[END], f"saving at {world} in {mode} changed the training")


def save_plain(root: Path) -> None:
    """By the plain optimizer, with our function and with torch's."""
    model, optimizer = plain()
    train(model, optimizer, range(SAVED_AT))
    checkpoint.save(root / "own-plain", optimizer, model, extra={**EXTRA, "rank": 0})
    form = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(form, checkpoint_id=root / "torch-plain")


def build_zoo(root: Path) -> None:
    torch.save(uninterrupted(), root / "expected.pt")
    for world, mode in ((4, "element"), (4, "tensor"), (3, "zero2"), (2, "element"), (1, "element")):
        run_ranks(save_zoo, world, root, mode, **LIMITS)
    save_plain(root)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A directory of checkpoints of one and the same state."""
    return once(tmp_path_factory, worker_id, "zoo", build_zoo)


OWN = ["own-element-4", "own-tensor-4", "own-zero2-3", "own-element-2", "own-element-1", "own-plain"]
TORCH = ["dict-element-4", "dict-tensor-4", "dict-zero2-3", "torch-element-4", "torch-tensor-4", "torch-plain"]


def load_all(rank: int, world: int, root: Path, names: list[str], turn: int) -> None:
    """Each checkpoint in one of the modes; three turns are all of them."""
    expected = torch.load(root / "expected.pt")
    for position, name in enumerate(names):
        mode = list(MODES)[(position + turn) % 3]
        claim = f"{name} loaded at {world} in {mode}"
        model, optimizer = unlike(mode)
        extra = checkpoint.load(root / name, optimizer, model)
        assert_same(extra, {**EXTRA, "rank": 0} if name.startswith("own") else {}, claim)
        check(model, optimizer, expected[SAVED_AT], claim)
        train(model, optimizer, range(SAVED_AT, END))
        check(model, optimizer, expected[END], f"{claim} and trained")


@pytest.mark.parametrize(("world", "turn"), [(3, 0), (5, 1), (2, 2), (1, 0)])
def test_training_goes_on_as_if_never_interrupted_at_any_number_of_ranks(zoo, world, turn):
    run_ranks(load_all, world, zoo, OWN, turn, **LIMITS)


@pytest.mark.parametrize(("world", "turn"), [(1, 0), (2, 1), (3, 2)])
def test_load_reads_what_was_saved_with_dcp_itself(zoo, world, turn):
    run_ranks(load_all, world, zoo, TORCH, turn, **LIMITS)


def load_on_top(rank: int, world: int, root: Path) -> None:
    """An optimizer that has been trained elsewhere has nothing left of it."""
    expected = torch.load(root / "expected.pt")
    for mode in MODES:
        model, optimizer = unlike(mode, weight_decay=0.7, amsgrad=True, parameters_as_bucket_view=mode == "tensor")
        train(model, optimizer, range(20, 22))
        checkpoint.load(root / "own-element-4", optimizer, model)
        train(model, optimizer, range(SAVED_AT, END))
        check(model, optimizer, expected[END], f"{mode}: on top of other state")


def test_loading_into_a_trained_optimizer_leaves_nothing_of_what_it_had(zoo):
    run_ranks(load_on_top, 3, zoo, **LIMITS)


@pytest.mark.parametrize("name", [*OWN, *TORCH])
def test_the_plain_optimizer_loads_every_checkpoint(zoo, name):
    expected = torch.load(zoo / "expected.pt")
    model, optimizer = Zoo(500), None
    optimizer = AdamW(groups_of(model), lr=0.7)
    checkpoint.load(zoo / name, optimizer, model)
    assert_same(photo(model, optimizer), expected[SAVED_AT])
    train(model, optimizer, range(SAVED_AT, END))
    assert_same(photo(model, optimizer), expected[END])


def test_parameters_were_cut_into_several_boxes(zoo):
    """Otherwise the tests above show nothing."""
    entries = metadata_of(zoo / "own-element-4").state_dict_metadata
    assert len(entries["optim.state.embed.exp_avg"].chunks) > 4
    assert len(entries["optim.state.deep.exp_avg"].chunks) > 4
    assert len(entries["optim.state.brief.exp_avg"].chunks) > 4


# --- what is inside -------------------------------------------------------------------------------------------------


def metadata_of(directory: Path) -> Any:
    return dcp.FileSystemReader(directory).read_metadata()


def opened_by_torch(directory: Path, to: Path) -> dict[str, Any]:
    dcp_to_torch_save(directory, to)
    return torch.load(to, weights_only=True)


def by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """A plain optimizer's state dict with names for numbers, nothing else changed."""
    names = {param: name for name, param in model.named_parameters()}
    ordered = [names[param] for group in optimizer.param_groups for param in group["params"]]
    form = optimizer.state_dict()
    return {
        "state": {ordered[index]: entry for index, entry in form["state"].items()},
        "param_groups": [{**group, "params": [ordered[i] for i in group["params"]]} for group in form["param_groups"]],
    }


@pytest.mark.parametrize("name", [*OWN, *TORCH])
def test_torchs_own_tool_opens_it_and_finds_the_plain_state_by_name_whoever_wrote_it(zoo, name, tmp_path):
    """Keys, shapes, dtypes and values are those of one process: no padding, no rank, no world size."""
    model, optimizer = plain()
    train(model, optimizer, range(SAVED_AT))
    expected = {"model": dict(model.state_dict()), "optim": by_name(model, optimizer)}
    if name.startswith("own"):
        expected["extra"] = {**EXTRA, "rank": 0}
    assert_same(opened_by_torch(zoo / name, tmp_path / "out.pt"), expected, name)


def test_checkpoints_of_all_numbers_of_ranks_have_the_same_metadata_but_for_the_places(zoo):
    def description(name: str) -> dict[str, Any]:
        entries = metadata_of(zoo / name).state_dict_metadata
        return {
            key: (getattr(e, "size", None), getattr(getattr(e, "properties", None), "dtype", None))
            for key, e in entries.items()
        }

    assert {name: description(name) == description("own-plain") for name in OWN} == dict.fromkeys(OWN, True)
    assert not [key for key in description("own-plain") if "world" in key or "pad" in key]


def test_every_chunk_of_a_tensor_is_inside_it_and_they_never_overlap(zoo):
    for name in (*OWN, *TORCH):
        for key, entry in metadata_of(zoo / name).state_dict_metadata.items():
            if hasattr(entry, "chunks"):
                seen = torch.zeros(entry.size, dtype=torch.int64)
                for chunk in entry.chunks:
                    box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
                    assert seen[box].shape == chunk.sizes, f"{name}: {key} is padded"
                    seen[box] += 1
                assert seen.eq(1).all(), f"{name}: {key}"


@pytest.mark.parametrize("name", ["own-element-4", "own-tensor-4", "own-zero2-3", "dict-element-4", "torch-element-4"])
def test_the_plain_optimizer_loads_what_torchs_tool_made_of_it(zoo, name, tmp_path):
    found = opened_by_torch(zoo / name, tmp_path / "out.pt")
    model, optimizer = plain(partial(Zoo, 500), lr=0.7)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optim"])
    train(model, optimizer, range(SAVED_AT, END))
    assert_same(photo(model, optimizer), torch.load(zoo / "expected.pt")[END])


def test_a_checkpoint_without_a_model_and_without_extra_has_neither(tmp_path):
    model, optimizer = plain(Simple)
    train(model, optimizer, range(2))
    checkpoint.save(tmp_path / "bare", optimizer)
    assert {path[0] for path in metadata_of(tmp_path / "bare").planner_data.values()} == {"optim"}
    other, loaded = plain(Simple)
    weights = dict(other.state_dict())
    assert checkpoint.load(tmp_path / "bare", loaded) == {}
    assert_same(loaded.state_dict(), optimizer.state_dict())
    assert_same(dict(other.state_dict()), weights)


# --- FSDP2, DTensors, and DCP called by the user ----------------------------------------------------------------------


def into_dtensors(rank: int, world: int, root: Path) -> None:
    """Plain dcp.load into DTensors, as an FSDP2 user has them, sharded in any dimension or replicated."""
    mesh = init_device_mesh("cpu", (world,))
    state = torch.load(root / "expected.pt")[SAVED_AT]["optim"]["state"]
    index = {"embed": 0, "deep": 1, "brief": 6}
    for name in ("own-element-4", "own-plain", "dict-zero2-3"):
        for sharded, reader in itertools.product((Shard(0), Shard(1), Replicate()), (dcp.FileSystemReader, Reader)):
            template = {
                param: {
                    key: distribute_tensor(torch.zeros_like(state[index[param]][key]), mesh, [sharded])
                    for key in ("exp_avg", "exp_avg_sq")
                }
                for param in index
            }
            dcp.load({"optim": {"state": template}}, storage_reader=reader(root / name))
            for param, entry in template.items():
                for key, value in entry.items():
                    claim = f"{name} {sharded} {reader} {param} {key}"
                    assert_same(value.full_tensor(), state[index[param]][key], claim)


@pytest.mark.parametrize("world", [3])
def test_dtensors_read_it_with_plain_dcp(zoo, world):
    run_ranks(into_dtensors, world, zoo, **LIMITS)


def save_simple(rank: int, world: int, directory: Path) -> None:
    model, optimizer = sharded("element", Simple)
    train(model, optimizer, range(SAVED_AT))
    checkpoint.save(directory, optimizer, model)


def go_on_with_fsdp2(rank: int, world: int, ours: Path, theirs: Path) -> None:
    model = Simple(500)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = AdamW(groups_of(model), lr=0.7)
    form = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(form, checkpoint_id=ours)
    model.load_state_dict(form["model"])
    set_optimizer_state_dict(model, optimizer, form["optim"])
    dcp.save({"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=theirs)


def come_back_from_fsdp2(rank: int, world: int, theirs: Path, expected: dict[str, Any]) -> None:
    for mode in MODES:
        model, optimizer = unlike(mode, Simple)
        checkpoint.load(theirs, optimizer, model)
        train(model, optimizer, range(SAVED_AT, END))
        check(model, optimizer, expected, f"{mode} from FSDP2")


def test_an_fsdp2_program_loads_it_and_what_it_saves_is_loaded_by_ours(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    run_ranks(save_simple, 3, ours, **LIMITS)
    model, optimizer = plain(partial(Simple, 500), lr=0.7)
    found = opened_by_torch(ours, tmp_path / "out.pt")
    model.load_state_dict(found["model"])
    set_optimizer_state_dict(model, optimizer, found["optim"])
    assert_same(photo(model, optimizer), uninterrupted(Simple)[SAVED_AT])
    run_ranks(go_on_with_fsdp2, 2, ours, theirs, **LIMITS)
    run_ranks(come_back_from_fsdp2, 3, theirs, uninterrupted(Simple)[END], **LIMITS)


def load_with_dcp(rank: int, world: int, root: Path) -> None:
    """dcp.load into opt.sharded_state_dict, and load_sharded_state_dict, by fresh and by trained optimizers."""
    expected = torch.load(root / "expected.pt")
    names = ("own-element-4", "own-tensor-4", "dict-element-4", "dict-tensor-4", "dict-zero2-3", "torch-plain")
    for position, name in enumerate(names):
        mode, trained = list(MODES)[(position + world) % 3], (position + world) % 2 == 0
        claim = f"{name} with dcp.load at {world} in {mode}, {trained=}"
        model, optimizer = unlike(mode)
        if trained:
            train(model, optimizer, range(30, 31))
        form = {"model": model.state_dict(), "optim": optimizer.sharded_state_dict(model)}
        dcp.load(form, checkpoint_id=root / name)
        model.load_state_dict(form["model"])
        optimizer.load_sharded_state_dict(form["optim"], model)
        check(model, optimizer, expected[SAVED_AT], claim)
        train(model, optimizer, range(SAVED_AT, END))
        check(model, optimizer, expected[END], f"{claim} and trained")


@pytest.mark.parametrize("world", [2, 3])
def test_users_who_call_dcp_themselves_load_with_sharded_state_dicts(zoo, world):
    run_ranks(load_with_dcp, world, zoo, **LIMITS)


def looking_changes_nothing(rank: int, world: int) -> None:
    """sharded_state_dict of an optimizer that never stepped: no phantom step, no state, no gradient."""
    for mode in MODES:
        for optimizer_class in (AdamW, Adagrad, SGD):
            model, optimizer = sharded(mode, Simple, optimizer_class)
            steps: list[Any] = []
            optimizer.register_step_pre_hook(lambda *args, steps=steps: steps.append(1))
            weights, held = dict(Simple().state_dict()), str(optimizer.optim.state)
            form = optimizer.sharded_state_dict(model)
            assert set(form["state"]) == {name for name, _ in model.named_parameters()}
            assert (steps, str(optimizer.optim.state)) == ([], held)
            assert all(param.grad is None for param in model.parameters())
            assert_same(dict(model.state_dict()), weights, mode)
            optimizer.load_sharded_state_dict(form, model)  # nothing was loaded into it
            assert str(optimizer.optim.state) == held
            if optimizer_class is not Adagrad:  # (which has state from the start)
                # BUG A-7
                assert optimizer.state_dict()["state"] == {}, "the empty form, without consolidation"
            train(model, optimizer, range(2))
            other, oracle = plain(Simple, optimizer_class)
            train(other, oracle, range(2))
            check(model, optimizer, photo(other, oracle), f"{mode} {optimizer_class.__name__}")


def test_a_sharded_state_dict_of_a_new_optimizer_changes_nothing_and_loads_as_nothing():
    run_ranks(looking_changes_nothing, 3, **LIMITS)


def whole_form(rank: int, world: int, root: Path) -> None:
    """load_sharded_state_dict takes whole tensors, too, and neither changes nor keeps them."""
    expected = torch.load(root / "expected.pt")
    form, untouched = (torch.load(root / "out.pt", weights_only=True) for _ in range(2))
    for mode in MODES:
        model, optimizer = unlike(mode)
        model.load_state_dict(form["model"])
        optimizer.load_sharded_state_dict(form["optim"], model)
        train(model, optimizer, range(SAVED_AT, END))
        check(model, optimizer, expected[END], mode)
        assert_same(form, untouched, f"{mode} changed the caller's dict")


def test_whole_tensors_by_name_load_as_well(zoo):
    dcp_to_torch_save(zoo / "own-element-2", zoo / "out.pt")
    run_ranks(whole_form, 3, zoo, **LIMITS)


def save_asynchronously_with_dcp(rank: int, world: int, root: Path, end: dict[str, Any]) -> None:
    for mode in MODES:
        model, optimizer = sharded(mode)
        train(model, optimizer, range(SAVED_AT))
        form = {"model": model.state_dict(), "optim": optimizer.sharded_state_dict(model)}
        saving = dcp.async_save(form, checkpoint_id=root / mode)
        train(model, optimizer, range(SAVED_AT, END))  # meanwhile
        saving.result()
        check(model, optimizer, end, mode)


@needs_copies_of_async_save
def test_dcps_own_async_save_keeps_the_state_of_the_call(zoo, tmp_path):
    expected = torch.load(zoo / "expected.pt")
    run_ranks(save_asynchronously_with_dcp, 3, tmp_path, expected[END], **LIMITS)
    for mode in MODES:
        model, optimizer = plain(partial(Zoo, 500))
        checkpoint.load(tmp_path / mode, optimizer, model)
        assert_same(photo(model, optimizer), expected[SAVED_AT], mode)


# --- every optimizer, every size ------------------------------------------------------------------------------------


class Matrices(Graded):
    """Only matrices: what Muon takes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.weights = nn.ParameterList(noise(shape, seed + i) for i, shape in enumerate(((31, 7), (64, 48), (5, 5))))


class One(Graded):
    """A single parameter, with more ranks than it can be given to."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.weight = Parameter(noise((3,), seed))


class Normed(Optimizer):
    """Keeps things that are no tensor, a number in a tensor of one element, and a nested dict."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["count"] = state.get("count", 0) + 1
                    state["norm"] = param.grad.norm().reshape(1) + state.get("norm", 0)
                    state["deep"] = {"sum": param.grad + state.get("deep", {}).get("sum", 0)}
                    param.sub_(state["deep"]["sum"] * group["lr"] / (1 + state["norm"]))


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adamw amsgrad": (Zoo, AdamW, {"amsgrad": True}),
    "sgd without state": (Simple, SGD, {}),
    "sgd with momentum": (Simple, SGD, {"momentum": 0.9}),
    "adagrad": (Simple, Adagrad, {}),
    "adafactor": (Simple, Adafactor, {}),
    "muon": (Matrices, Muon, {}),
    "odd state": (Simple, Normed, {}),
    "one parameter": (One, AdamW, {}),
    "lr in a tensor": (Simple, AdamW, {"lr": torch.tensor(0.01, dtype=torch.float64), "foreach": False}),
}
if Muon is None:
    del CASES["muon"]
WHOLE = ("adafactor", "muon", "odd state")  # no rank can hold part of a parameter


def modes_of(case: str) -> tuple[str, str]:
    return ("zero2", "tensor") if case in WHOLE else ("element", "tensor")


def save_cases(rank: int, world: int, root: Path) -> None:
    for case, (make, optimizer_class, options) in CASES.items():
        for mode in modes_of(case):
            model, optimizer = sharded(mode, make, optimizer_class, **options)
            checkpoint.save(root / case / f"{mode}-new", optimizer, model)  # before any step
            train(model, optimizer, range(SAVED_AT))
            checkpoint.save(root / case / f"{mode}-own", optimizer, model)
        form = {"model": model.state_dict(), "optim": optimizer.sharded_state_dict(model)}
        dcp.save(form, checkpoint_id=root / case / "tensor-dict")


def load_cases(rank: int, world: int, root: Path) -> None:
    for case, (make, optimizer_class, options) in CASES.items():
        expected = torch.load(root / f"{case}.pt", weights_only=False)
        one, other = modes_of(case) if world % 2 else modes_of(case)[::-1]
        for name, mode in ((f"{one}-own", other), (f"{other}-new", one), ("tensor-dict", one)):
            claim = f"{case}: {name} loaded at {world} in {mode}"
            model, optimizer = sharded(mode, make, optimizer_class, seed=500, **options)
            checkpoint.load(root / case / name, optimizer, model)
            train(model, optimizer, range(0 if "new" in name else SAVED_AT, END))
            check(model, optimizer, expected[END], claim)


def build_cases(root: Path) -> None:
    for case, (make, optimizer_class, options) in CASES.items():
        torch.save(uninterrupted(make, optimizer_class, **options), root / f"{case}.pt")
    run_ranks(save_cases, 3, root, **LIMITS)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    return once(tmp_path_factory, worker_id, "cases", build_cases)


@pytest.mark.extended
@pytest.mark.parametrize("world", [2])
def test_every_optimizer_goes_on_at_another_number_of_ranks(cases, world):
    run_ranks(load_cases, world, cases, **LIMITS)


@pytest.mark.extended
@pytest.mark.parametrize("case", with_muon_if_there(dict.fromkeys((*CASES, "muon"))))
def test_every_plain_optimizer_loads_what_the_sharded_one_saved_and_back(cases, case, tmp_path):
    make, optimizer_class, options = CASES[case]
    expected = torch.load(cases / f"{case}.pt", weights_only=False)
    directory = cases / case / "tensor-own"
    for round_trip in range(2):
        model, optimizer = plain(partial(make, 500), optimizer_class, **options)
        checkpoint.load(directory, optimizer, model)
        assert_same(photo(model, optimizer), expected[SAVED_AT], f"{case} {round_trip}")
        directory = tmp_path / "again"
        checkpoint.save(directory, optimizer, model)
    train(model, optimizer, range(SAVED_AT, END))
    assert_same(photo(model, optimizer), expected[END], case)


def in_subgroups(rank: int, world: int, root: Path, expected: dict[int, Any]) -> None:
    """Two halves of the job each have an optimizer and a checkpoint of their own; ranks are those of the group."""
    halves = [dist.new_group([3, 1]), dist.new_group([0, 2, 4])]
    mine = halves[rank % 2 == 0]
    directory = root / f"half{rank % 2}"
    for mode in MODES:
        model, optimizer = sharded(mode, process_group=mine)
        train(model, optimizer, range(SAVED_AT))
        checkpoint.save(directory, optimizer, model)  # replaces the one before
        model, optimizer = sharded(mode, process_group=mine, seed=500)
        checkpoint.load(directory, optimizer, model)
        train(model, optimizer, range(SAVED_AT, END))
        check(model, optimizer, expected[END], f"{mode} in a sub-group")


def test_subgroups_save_and_load_for_themselves(zoo, tmp_path):
    run_ranks(in_subgroups, 5, tmp_path, torch.load(zoo / "expected.pt"), **LIMITS)


def wrapped(rank: int, world: int, root: Path, expected: dict[int, Any]) -> None:
    """Names are those of the plain module, in DDP, compiled, both ways round, and with or without the model."""
    wrap: dict[str, Callable[[nn.Module], nn.Module]] = {
        "ddp": DistributedDataParallel,
        "compiled": lambda model: torch.compile(model, backend="eager"),
        "ddp of compiled": lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
        "compiled ddp": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
    }
    for name, outside in wrap.items():
        model = Simple()
        outer = outside(model)
        optimizer = ZeroRedundancyOptimizer(groups_of(outer), AdamW, lr=0.01)
        train(model, optimizer, range(SAVED_AT))
        checkpoint.save(root / name, optimizer, outer)
        model, optimizer = unlike("tensor", Simple)
        checkpoint.load(root / name, optimizer, model)
        train(model, optimizer, range(SAVED_AT, END))
        check(model, optimizer, expected[END], f"saved by {name}")

        model = Simple(500)
        outer = outside(model)
        optimizer = ZeroRedundancyOptimizer(groups_of(outer), AdamW, lr=0.01)
        checkpoint.load(root / "ddp", optimizer, outer)
        train(model, optimizer, range(SAVED_AT, END))
        check(model, optimizer, expected[END], f"loaded by {name}")


def test_wrappers_leave_no_trace_in_the_names(tmp_path):
    run_ranks(wrapped, 2, tmp_path, uninterrupted(Simple), **LIMITS)


class Talkative(Simple):
    """A module with extra state, as torch's modules may have, and a submodule with a tensor for it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.seen: Any = {"epochs": seed, "names": ["a", "b"], "table": torch.arange(seed, seed + 3)}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def extra_state(rank: int, world: int, root: Path) -> None:
    for seen in ({"epochs": 3, "names": ["a", "b"], "table": torch.arange(3)}, torch.arange(4), 7):
        model, optimizer = sharded("element", Talkative)
        model.seen = seen
        train(model, optimizer, range(1))
        checkpoint.save(root / "talkative", optimizer, model)
        model, optimizer = sharded("tensor", Talkative, seed=500)
        model.seen = type(seen)() if isinstance(seen, (dict, int)) else torch.zeros(4, dtype=torch.int64)
        checkpoint.load(root / "talkative", optimizer, model)
        assert_same(model.seen, seen, f"{type(seen)}")


def test_the_extra_state_of_modules_is_kept(tmp_path):
    run_ranks(extra_state, 2, tmp_path, **LIMITS)


class Refusing(Talkative):
    def set_extra_state(self, state: Any) -> None:
        raise ValueError("not today")


def refused(rank: int, world: int, root: Path) -> None:
    """A model that refuses what it is to load, on one rank only: neither it nor the optimizer is changed anywhere."""
    model, optimizer = sharded("element", Talkative)
    model.seen = 7
    train(model, optimizer, range(2))
    checkpoint.save(root, optimizer, model)
    model, optimizer = sharded("element", Refusing if rank == 1 else Talkative, seed=500)
    model.seen = 8
    before = {name: value.clone() for name, value in model.named_parameters()}
    with pytest.raises((ValueError, RuntimeError)):
        checkpoint.load(root, optimizer, model)
    assert not any(optimizer.optim.state.values()), "the optimizer was loaded"
    assert optimizer.state_dict()["state"] == {}
    assert_same({name: value.detach() for name, value in model.named_parameters()}, before, "the model was loaded")


def test_a_model_that_refuses_to_load_leaves_everything_as_it_was(tmp_path):
    run_ranks(refused, 3, tmp_path / "checkpoint", **LIMITS)


def to_other_dtypes(rank: int, world: int, root: Path, plain_states: dict[torch.dtype, Any]) -> None:
    """A checkpoint in float64 into parameters of another dtype: cast as the plain optimizer casts."""
    for dtype, expected in plain_states.items():
        for mode in MODES:
            model, optimizer = unlike(mode, lambda seed, dtype=dtype: Simple(seed).to(dtype))
            checkpoint.load(root, optimizer, model)
            check(model, optimizer, expected, f"{mode} {dtype}")


def test_a_checkpoint_loads_into_parameters_of_another_dtype_as_into_the_plain_optimizer(tmp_path):
    model, optimizer = plain(Simple)
    train(model, optimizer, range(SAVED_AT))
    checkpoint.save(tmp_path / "float64", optimizer, model)
    expected = {}
    for dtype in (torch.float32, torch.bfloat16):
        other, oracle = plain(lambda dtype=dtype: Simple(500).to(dtype))
        other.load_state_dict(model.state_dict())
        oracle.load_state_dict(optimizer.state_dict())
        expected[dtype] = torch.load(_bytes(photo(other, oracle)))
    run_ranks(to_other_dtypes, 3, tmp_path / "float64", expected, **LIMITS)


# --- how much is read -----------------------------------------------------------------------------------------------


class Counted:
    """Bytes that this process reads from the data files of checkpoints, counted where the system is called."""

    def __init__(self) -> None:
        self.bytes = 0
        self._preadv, os.preadv = os.preadv, self._read

    def _read(self, *args: Any) -> int:
        count = self._preadv(*args)
        self.bytes += count
        return count

    def stop(self) -> int:
        os.preadv = self._preadv
        return self.bytes


class Megabytes(nn.Module):
    """Twelve parameters of a mebibyte, in shapes that are cut at odd places.

    They are put into one bucket: with the chosen size each would be one, and cut into as many pieces as there are
    ranks, of which a rank reads a block more at each end.
    """

    def __init__(self) -> None:
        super().__init__()
        shapes = ((512, 512), (1024, 256), (64, 64, 64), (2**18,))
        self.weights = nn.ParameterList(torch.zeros(shapes[i % 4]) for i in range(12))


STATE_BYTES = 12 * 2**20 * 2 + 12 * 4  # two moments and a step each


def step_megabytes(model: nn.Module, optimizer: Optimizer) -> None:
    for position, param in enumerate(model.parameters()):
        param.grad = noise(param.shape, position, torch.float32)
    optimizer.step()


def save_megabytes(rank: int, world: int, root: Path) -> None:
    for mode in ("element", "tensor"):
        model = Megabytes()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01, shard=mode, bucket_cap_mb=25)
        step_megabytes(model, optimizer)
        checkpoint.save(root / f"own-{mode}", optimizer)
        dcp.save({"optim": optimizer.sharded_state_dict()}, checkpoint_id=root / f"dcp-{mode}")


def load_megabytes(rank: int, world: int, root: Path) -> list[tuple[str, int]]:
    reads = []
    oracle_model = Megabytes()
    oracle = AdamW(oracle_model.parameters(), lr=0.01)
    step_megabytes(oracle_model, oracle)
    for name in ("own-element", "own-tensor", "dcp-element"):
        for mode in ("element", "tensor") if name == "own-element" else ("element",):
            model = Megabytes()
            optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01, shard=mode, bucket_cap_mb=25)
            counted = Counted()
            checkpoint.load(root / name, optimizer)
            reads.append((f"{name} into {mode}", counted.stop()))
            optimizer.consolidate_state_dict(to=0)
            if rank == 0:
                assert_same(optimizer.state_dict()["state"], oracle.state_dict()["state"], f"{name} into {mode}")
            optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01, shard=mode, bucket_cap_mb=25)
            reader = Reader(root / name)
            dcp.load({"optim": optimizer.sharded_state_dict()}, storage_reader=reader)
            reads.append((f"{name} into {mode} with dcp.load and our reader", reader.bytes_read))
    return reads


@pytest.mark.parametrize(("before", "after"), [pytest.param(4, 3, marks=pytest.mark.extended), (3, 4)])
def test_each_rank_reads_its_share_of_the_state_and_no_more(before, after, tmp_path):
    run_ranks(save_megabytes, before, tmp_path, **LIMITS)
    for rank, reads in enumerate(run_ranks(load_megabytes, after, tmp_path, **LIMITS)):
        for claim, count in reads:
            directory = tmp_path / claim.split()[0]
            about = sum(
                (directory / file).stat().st_size for file in os.listdir(directory) if not file.endswith(".distcp")
            )
            share = STATE_BYTES / after
            assert share * 0.99 <= count <= share * 1.01 + about, f"rank {rank} of {after}, {claim}: {count / share}"

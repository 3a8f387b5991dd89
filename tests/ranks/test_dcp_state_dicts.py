"""torch's ``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` with the sharded optimizer.

Oracle: the same functions with the plain optimizer, and its uninterrupted training. Bit by bit: see test_checkpoint.py.
"""

from __future__ import annotations

import copy
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adafactor, Adagrad, AdamW

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import assert_same
from tests.ranks.test_checkpoint import (
    END,
    LIMITS,
    MODES,
    SAVED_AT,
    Graded,
    Simple,
    check,
    groups_of,
    noise,
    once,
    photo,
    plain,
    sharded,
    train,
    uninterrupted,
    unlike,
)

FULL = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
FULL_FLAT = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
OPTIONS = {
    "sharded": StateDictOptions(),
    "sharded on the cpu": StateDictOptions(cpu_offload=True),
    "full": FULL,
    "full on rank 0": ON_RANK_0,
    "flat": FLAT,
    "full and flat": FULL_FLAT,
}


class Mixed(Graded):
    """Cut, small, scalar, channels_last, bf16 and frozen parameters; a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.embed = Parameter(noise((61, 37), seed))
        self.bias = Parameter(noise((13,), seed + 1))
        self.scale = Parameter(noise((), seed + 2))
        self.conv = Parameter(noise((6, 4, 3, 2), seed + 3).to(memory_format=torch.channels_last))
        self.brief = Parameter(noise((57, 31), seed + 4, torch.bfloat16))
        self.frozen = Parameter(noise((5, 3), seed + 5), requires_grad=False)
        self.register_buffer("mean", noise((4,), seed + 6))


def trained_plain(make: Any = Mixed, steps: int = SAVED_AT, optimizer_class: Any = AdamW) -> tuple[Any, Any]:
    model, optimizer = plain(make, optimizer_class)
    train(model, optimizer, range(steps))
    return model, optimizer


def held(optimizer: ZeroRedundancyOptimizer) -> list[Any]:
    """This rank's own state and options, copied."""
    groups = optimizer.optim.param_groups
    states = [copy.deepcopy(dict(optimizer.optim.state.get(param, {}))) for g in groups for param in g["params"]]
    options = [{k: v for k, v in group.items() if k != "params"} for group in (*groups, *optimizer.param_groups)]
    return [states, copy.deepcopy(options)]


# --- get ----------------------------------------------------------------------------------------------------------


def phantom(rank: int, world: int) -> None:
    """Taking a state dict steps nothing, makes no state and no gradient, and changes no option: new or trained."""
    for mode, optimizer_class in (("element", AdamW), ("tensor", Adagrad), ("zero2", AdamW)):
        for steps in (0, 2):
            model, optimizer = sharded(mode, Mixed, optimizer_class)
            train(model, optimizer, range(steps))
            optimizer.zero_grad()
            fired: list[int] = []
            optimizer.register_step_pre_hook(lambda *args, fired=fired: fired.append(1))
            optimizer.register_step_post_hook(lambda *args, fired=fired: fired.append(2))
            before = copy.deepcopy(dict(model.state_dict())), held(optimizer)
            for name, options in OPTIONS.items():
                claim = f"{mode} {steps=} {name}"
                get_optimizer_state_dict(model, optimizer, options=options)
                assert_same((dict(model.state_dict()), held(optimizer)), before, claim)
                assert fired == [], claim
                assert all(param.grad is None for param in model.parameters()), claim
            oracle_model, oracle = trained_plain(steps=steps, optimizer_class=optimizer_class)
            train(model, optimizer, range(steps, 4))
            train(oracle_model, oracle, range(steps, 4))
            check(model, optimizer, photo(oracle_model, oracle), f"{mode} {steps=}")


@pytest.mark.parametrize("world", [1, 3])
def test_taking_a_state_dict_is_no_step(world):
    run_ranks(phantom, world, **LIMITS)


def full_dicts(rank: int, world: int) -> None:
    for optimizer_class in (AdamW, SGD, Adagrad, Adafactor):
        oracle_model, oracle = trained_plain(Simple if optimizer_class is Adafactor else Mixed, 2, optimizer_class)
        for mode in MODES:
            if optimizer_class is Adafactor and mode == "element":
                continue
            claim = f"{mode} {optimizer_class.__name__}"
            model, optimizer = sharded(mode, type(oracle_model), optimizer_class)
            train(model, optimizer, range(2))
            for options in (FULL, FULL_FLAT):
                expected = get_optimizer_state_dict(oracle_model, oracle, options=options)
                found = get_optimizer_state_dict(model, optimizer, options=options)
                assert_same(found, expected, f"{claim} flat={options.flatten_optimizer_state_dict}")
            expected = get_optimizer_state_dict(oracle_model, oracle, options=ON_RANK_0)
            found = get_optimizer_state_dict(model, optimizer, options=ON_RANK_0)
            assert_same(found, expected if rank == 0 else {}, f"{claim} on rank 0 only")


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_full_dict_is_the_plain_optimizers(world):
    run_ranks(full_dicts, world, **LIMITS)


# --- save and load with DCP, at other numbers of ranks ------------------------------------------------------------


def save(rank: int, world: int, root: Path) -> None:
    for mode in MODES:
        model, optimizer = sharded(mode, Mixed)
        train(model, optimizer, range(SAVED_AT))
        form = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.save(form, checkpoint_id=root / f"{mode}-sharded")
        form = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer, options=FLAT)}
        dcp.save(form, checkpoint_id=root / f"{mode}-flat")
        train(model, optimizer, range(SAVED_AT, END))
        check(model, optimizer, torch.load(root / "expected.pt")[END], f"{mode}: saving changed the training")


def build(root: Path) -> None:
    torch.save(uninterrupted(Mixed), root / "expected.pt")
    run_ranks(save, 4, root, **LIMITS)
    model, optimizer = trained_plain()
    for name, options in (("sharded", StateDictOptions()), ("flat", FLAT)):
        form = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer, options=options)}
        dcp.save(form, checkpoint_id=root / f"plain-{name}")
    full = get_optimizer_state_dict(model, optimizer, options=FULL)
    for entry in full["state"].values():  # torch's broadcast from rank 0 scrambles channels_last, for any optimizer
        entry.update((key, value.contiguous()) for key, value in entry.items())
    torch.save(full, root / "full.pt")
    torch.save(get_optimizer_state_dict(model, optimizer, options=FULL_FLAT), root / "flat.pt")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    return once(tmp_path_factory, worker_id, "dcp", build)


def load(rank: int, world: int, root: Path, turn: int) -> None:
    """Every checkpoint, in one of the modes; three turns are all."""
    expected = torch.load(root / "expected.pt")
    kinds = (("sharded", StateDictOptions()), ("flat", FLAT))
    cases = [(saved, *kind) for saved in (*MODES, "plain") for kind in kinds]
    for position, (saved, kind, options) in enumerate(cases):
        mode, trained = list(MODES)[(position + turn) % 3], (position + turn) % 4 < 2
        claim = f"{saved}-{kind} loaded at {world} in {mode}, {trained=}"
        model, optimizer = unlike(mode, Mixed)
        if trained:
            train(model, optimizer, range(30, 32))
        form = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer, options=options)}
        dcp.load(form, checkpoint_id=root / f"{saved}-{kind}")
        model.load_state_dict(form["model"])
        set_optimizer_state_dict(model, optimizer, form["optim"], options=options)
        check(model, optimizer, expected[SAVED_AT], claim)
        train(model, optimizer, range(SAVED_AT, END))
        check(model, optimizer, expected[END], f"{claim}, trained")


@pytest.mark.parametrize(("world", "turn"), [(1, 0), (3, 1), (2, 2), (5, 0)])
def test_sharded_dicts_load_at_another_number_of_ranks_and_training_goes_on(root, world, turn):
    run_ranks(load, world, root, turn, **LIMITS)


@pytest.mark.parametrize("saved", [*MODES, "plain"])
@pytest.mark.parametrize(
    ("kind", "options"), [("sharded", StateDictOptions()), ("flat", FLAT)], ids=["sharded", "flat"]
)
def test_the_plain_optimizer_loads_the_sharded_dicts(root, saved, kind, options):
    expected = torch.load(root / "expected.pt")
    model, optimizer = plain(partial(Mixed, 500), lr=0.7)
    form = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.load(form, checkpoint_id=root / f"{saved}-{kind}")
    model.load_state_dict(form["model"])
    set_optimizer_state_dict(model, optimizer, form["optim"], options=options)
    train(model, optimizer, range(SAVED_AT, END))
    assert_same(photo(model, optimizer), expected[END])


def load_full(rank: int, world: int, root: Path) -> None:
    """The plain optimizer's full dict, on every rank or on rank 0 only, nested or flat; nobody changes the dict."""
    expected = torch.load(root / "expected.pt")
    sources = {
        "on all ranks": ("full.pt", FULL, True),
        "on rank 0": ("full.pt", FROM_RANK_0, False),
        "flat on all ranks": ("flat.pt", FLAT, True),  # (with both options torch's function fails for any optimizer)
    }
    for position, (mode, name) in enumerate(itertools.product(MODES, sources)):
        (file, options, everywhere), trained = sources[name], (position + world) % 2 == 0
        claim = f"full dict {name} at {world} in {mode}, {trained=}"
        model, optimizer = unlike(mode, Mixed)
        if trained:
            train(model, optimizer, range(30, 32))
        model.load_state_dict(expected[SAVED_AT]["model"])
        given = torch.load(root / file) if everywhere or rank == 0 else {}
        set_optimizer_state_dict(model, optimizer, given, options=options)
        assert_same(given, torch.load(root / file) if given else {}, f"{claim}: the dict was changed")
        pairs_again(optimizer)
        check(model, optimizer, expected[SAVED_AT], claim)
        train(model, optimizer, range(SAVED_AT, END))
        check(model, optimizer, expected[END], f"{claim}, trained")


def pairs_again(optimizer: ZeroRedundancyOptimizer) -> None:
    """torch's function makes lists of betas when it loads a full dict, also for the plain optimizer."""
    for group in optimizer.param_groups:
        group.update((key, tuple(value)) for key, value in group.items() if isinstance(value, list) and key != "params")


@pytest.mark.parametrize("world", [1, 3])
def test_full_dicts_of_the_plain_optimizer_load_everywhere(root, world):
    run_ranks(load_full, world, root, **LIMITS)


def round_trip(rank: int, world: int, root: Path) -> None:
    """A full dict of ours into ours in another mode; and model and optimizer together, in DDP: names are the same."""
    expected = torch.load(root / "expected.pt")
    for one, other in (("element", "tensor"), ("tensor", "zero2"), ("zero2", "element")):
        model, optimizer = sharded(one, Mixed)
        train(model, optimizer, range(SAVED_AT))
        full = get_optimizer_state_dict(model, optimizer, options=FULL)
        both = get_state_dict(model, optimizer, options=FULL)
        model, optimizer = unlike(other, Mixed)
        model.load_state_dict(expected[SAVED_AT]["model"])
        set_optimizer_state_dict(model, optimizer, full if rank == 0 else {}, options=FROM_RANK_0)
        pairs_again(optimizer)
        train(model, optimizer, range(SAVED_AT, END))
        check(model, optimizer, expected[END], f"{one} to {other}")

        model = Mixed(500)
        wrapped = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(
            groups_of(wrapped), AdamW, lr=0.7, shard=other if other != "zero2" else "auto"
        )
        set_state_dict(wrapped, optimizer, model_state_dict=both[0], optim_state_dict=both[1], options=FULL)
        pairs_again(optimizer)
        train(model, optimizer, range(SAVED_AT, END))
        check(model, optimizer, expected[END], f"{one} to {other} in DDP")
        again = get_optimizer_state_dict(wrapped, optimizer, options=FULL)
        assert again["state"].keys() == full["state"].keys()


def test_full_dicts_go_from_mode_to_mode_and_into_ddp(root):
    run_ranks(round_trip, 3, root, **LIMITS)


def others(rank: int, world: int, root: Path) -> None:
    """Optimizers without state, with state from the start, and with state of shapes of its own."""
    for optimizer_class in (SGD, Adagrad, Adafactor):
        end = uninterrupted(Simple, optimizer_class)[END]
        for mode in MODES:
            if optimizer_class is Adafactor and mode == "element":
                continue
            directory = root / f"{optimizer_class.__name__}-{mode}"
            model, optimizer = sharded(mode, Simple, optimizer_class)
            train(model, optimizer, range(SAVED_AT))
            weights = copy.deepcopy(dict(model.state_dict()))
            dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=directory)
            full = get_optimizer_state_dict(model, optimizer, options=FULL)
            for kind in ("sharded", "full" if mode == "tensor" else "from rank 0"):
                claim = f"{optimizer_class.__name__} {mode} {kind}"
                model, optimizer = sharded(mode, Simple, optimizer_class, seed=500)
                model.load_state_dict(weights)
                if kind == "sharded":
                    form = {"optim": get_optimizer_state_dict(model, optimizer)}
                    dcp.load(form, checkpoint_id=directory)
                    set_optimizer_state_dict(model, optimizer, form["optim"])
                elif kind == "full":
                    set_optimizer_state_dict(model, optimizer, full, options=FULL)
                else:
                    set_optimizer_state_dict(model, optimizer, full if rank == 0 else {}, options=FROM_RANK_0)
                pairs_again(optimizer)
                train(model, optimizer, range(SAVED_AT, END))
                check(model, optimizer, end, claim)


def test_other_optimizers_go_on_as_well(tmp_path):
    run_ranks(others, 3, tmp_path, **LIMITS)


def nothing_yet(rank: int, world: int) -> None:
    """The dicts of an optimizer that never stepped, loaded into one that has: as new again."""
    for mode in MODES:
        for options in (StateDictOptions(), FULL):
            model, optimizer = sharded(mode, Simple)
            empty = get_optimizer_state_dict(model, optimizer, options=options)
            model, optimizer = unlike(mode, Simple)
            train(model, optimizer, range(2))
            set_optimizer_state_dict(model, optimizer, empty, options=options)
            pairs_again(optimizer)
            model.load_state_dict(Simple().state_dict())
            oracle_model, oracle = plain(Simple)
            train(model, optimizer, range(3))
            train(oracle_model, oracle, range(3))
            check(model, optimizer, photo(oracle_model, oracle), f"{mode} full={options.full_state_dict}")


def test_the_dict_of_a_new_optimizer_loads_as_nothing():
    run_ranks(nothing_yet, 3, **LIMITS)

"""Checkpoints by name: what becomes of moments and options when the model or its groups have changed since.

Oracle: the plain optimizer over the same names, never interrupted. Gradients depend on the name alone, are the same on
every rank, and have few bits, so that their mean over any number of ranks is exact: everything is compared bit by bit.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.harness import run_ranks
from tests.oracle import assert_same, error_of
from tests.ranks.test_checkpoint import once

LIMITS = {"timeout": 80, "pg_timeout": 30}
SAVED_AT, END = 3, 6
MODES: dict[str, dict[str, Any]] = {
    "element": {"shard": "element"},
    "tensor": {"shard": "tensor"},
    "zero2": {"shard_gradients": True},
}
SHAPES = {"a": (40, 33), "b": (13,), "c": (30, 29), "d": (7, 5, 3), "e": (11,)}
GROUPS = ({"of": "ab", "lr": 0.02, "weight_decay": 0.3}, {"of": "cde", "lr": 0.05, "betas": (0.8, 0.95)})
Groups = Sequence[Mapping[str, Any]]


def noise(name: str, shape: Iterable[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


class Named(nn.Module):
    """Parameters by name. ``forward`` is the loss of a step, and gives each a gradient that belongs to its name."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], frozen: str = "", seed: int = 0) -> None:
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, Parameter(noise(name, shape, seed), requires_grad=name not in frozen))

    def forward(self, step: int) -> Tensor:
        trained = [(name, param) for name, param in self.named_parameters() if param.requires_grad]
        return sum((param * (noise(name, param.shape, 100 + step) * 4).round() / 4).sum() for name, param in trained)


def made(groups: Groups, model: Named) -> list[dict[str, Any]]:
    return [
        {**{k: group[k] for k in group if k != "of"}, "params": [getattr(model, n) for n in group["of"]]}
        for group in groups
    ]


def sharded(model: Named, groups: Groups = GROUPS, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(made(groups, model), AdamW, lr=0.01, **options)


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()


def states_of(model: nn.Module, optimizer: Any) -> dict[str, dict[str, Any]]:
    """The whole state of every parameter by name. Collective for ours."""
    entry = optimizer.full_state if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer.state.get
    known = {param for group in optimizer.param_groups for param in group["params"]}
    return {name: dict(entry(param) or {}) if param in known else {} for name, param in model.named_parameters()}


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def bits_of(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> Any:
    """Everything that a failed load must leave alone, on this rank: copies, to be compared later."""
    local = [
        [
            {key: _copied(value) for key, value in optimizer.optim.state.get(param, {}).items()}
            for param in group["params"]
        ]
        for group in optimizer.optim.param_groups
    ]
    local_options = [{**options} for options in options_of(optimizer.optim)]
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return weights, local, [{**options} for options in options_of(optimizer)], local_options


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def plain_of(
    shapes: Mapping[str, Sequence[int]] = SHAPES, groups: Groups = GROUPS, frozen: str = ""
) -> tuple[Named, AdamW]:
    model = Named(shapes, frozen)
    return model, AdamW(made(groups, model), lr=0.01)


# --- one checkpoint for all -----------------------------------------------------------------------------------------


def save(rank: int, world: int, root: Path) -> None:
    for mode in MODES:
        model = Named(SHAPES)
        optimizer = sharded(model, **MODES[mode])
        checkpoint.save(root / f"{mode}-new", optimizer, model)
        train(model, optimizer, range(SAVED_AT))
        checkpoint.save(root / mode, optimizer, model, extra={"step": SAVED_AT})
    form = {"model": model.state_dict(), "optim": optimizer.sharded_state_dict(model)}
    dcp.save(form, checkpoint_id=root / "dcp")
    model = Named(SHAPES, frozen="ae")
    optimizer = sharded(model)
    train(model, optimizer, range(SAVED_AT))
    checkpoint.save(root / "frozen", optimizer, model)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    return once(tmp_path_factory, worker_id, "names", lambda root: run_ranks(save, 3, root, **LIMITS) and None)


# --- groups in another order ----------------------------------------------------------------------------------------


def reordered(rank: int, world: int, root: Path) -> None:
    """Groups, and parameters in groups and in the model, in another order; groups split in two."""
    orders: dict[str, Groups] = {
        "reversed": ({"of": "edc", "lr": 9.0}, {"of": "ba", "lr": 9.0}),
        "split": ({"of": "d"}, {"of": "b"}, {"of": "ce"}, {"of": "a"}),
        "same": GROUPS,
    }
    for position, (mode, kind) in enumerate(MODES.items()):
        oracle_model, oracle = plain_of()
        train(oracle_model, oracle, range(SAVED_AT))
        expected, where = states_of(oracle_model, oracle), {n: i for i, g in enumerate(GROUPS) for n in g["of"]}
        weights = dict(oracle_model.state_dict())
        saved = [{**options} for options in options_of(oracle)]
        expected = {name: {key: value.clone() for key, value in entry.items()} for name, entry in expected.items()}
        weights = {name: value.clone() for name, value in weights.items()}
        train(oracle_model, oracle, range(SAVED_AT, END))
        for name, groups in orders.items():
            claim = f"{name} groups at {world} in {mode}"
            model = Named({key: SHAPES[key] for key in "dbeca"}, seed=500)
            optimizer = sharded(model, groups, **kind)
            extra = checkpoint.load(root / [*MODES, "dcp"][(position + world) % 4], optimizer, model)
            assert extra in ({"step": SAVED_AT}, {})
            assert_same(dict(model.state_dict()), weights, claim)
            assert_same(states_of(model, optimizer), expected, claim)
            for group, options in zip(groups, options_of(optimizer), strict=True):
                assert_same(options, saved[where[group["of"][0]]], f"{claim}: group of {group['of']}")
            train(model, optimizer, range(SAVED_AT, END))
            assert_same(dict(model.state_dict()), dict(oracle_model.state_dict()), f"{claim}, trained")
            assert_same(states_of(model, optimizer), states_of(oracle_model, oracle), f"{claim}, trained")


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.again), 5])
def test_moments_and_options_follow_names_whatever_the_order_of_groups(root, world):
    run_ranks(reordered, world, root, **LIMITS)


def joined(rank: int, world: int, root: Path) -> None:
    """Parameters of two groups with different options in one: nobody knows which to take."""
    together: Groups = ({"of": "abcde", "lr": 0.7},)
    for mode, kind in MODES.items():
        model = Named(SHAPES, seed=500)
        optimizer = sharded(model, together, **kind)
        before = bits_of(model, optimizer)
        error = error_of(lambda: checkpoint.load(root / mode, optimizer, model))  # noqa: B023
        assert isinstance(error, ValueError), error
        assert "parameter group 0" in str(error)
        assert_same(bits_of(model, optimizer), before, f"{mode}: joined groups")
        checkpoint.load(root / mode, optimizer, model, strict=False)
        oracle_model, oracle = plain_of()
        train(oracle_model, oracle, range(SAVED_AT))
        assert_same(states_of(model, optimizer), states_of(oracle_model, oracle), mode)
        assert optimizer.param_groups[0]["lr"] == 0.7


def test_groups_that_were_joined_keep_their_own_options_but_only_if_asked_to(root):
    run_ranks(joined, 3, root, **LIMITS)


# --- added, removed, misshapen --------------------------------------------------------------------------------------

# b is gone, new and newer have come, c has other rows, d has its elements in another shape
CHANGED = {"new": (9, 4), "a": (40, 33), "c": (31, 29), "d": (5, 7, 3), "e": (11,), "newer": (17,)}
CHANGED_GROUPS: Groups = ({"of": ["newer", "c", "e", "d"]}, {"of": ["a"]}, {"of": ["new"], "lr": 0.04})


def changed(kind: Mapping[str, Any], trained: bool = False) -> tuple[Named, ZeroRedundancyOptimizer]:
    model = Named(CHANGED, seed=500)
    optimizer = sharded(model, CHANGED_GROUPS, **kind)
    if trained:
        train(model, optimizer, range(20, 22))
    return model, optimizer


def strict(rank: int, world: int, root: Path) -> list[str]:
    told = []
    for mode, kind in MODES.items():
        for trained in (False, True):
            for given in (True, False):
                model, optimizer = changed(kind, trained)
                if not given:
                    optimizer = ZeroRedundancyOptimizer(named_groups(model), AdamW, lr=0.01, **kind)
                before = bits_of(model, optimizer)
                claim = f"{mode}, {trained=}, model {given=}"
                error = error_of(lambda: checkpoint.load(root / mode, optimizer, model if given else None), claim)  # noqa: B023
                assert isinstance(error, ValueError), f"{claim}: {error!r}"
                told.append(str(error))
                assert_same(bits_of(model, optimizer), before, claim)
    return told


def named_groups(model: Named) -> list[dict[str, Any]]:
    """The optimizer knows the names itself."""
    names = [[name for name in model._parameters if name in group["of"]] for group in CHANGED_GROUPS]
    return [{"params": [(name, getattr(model, name)) for name in some]} for some in names]


def test_a_strict_load_lists_everything_that_does_not_match_and_changes_nothing_on_any_rank(root):
    for told in run_ranks(strict, 3, root, **LIMITS):
        for text in told:
            missing, unexpected, misshapen = (
                text.split(f"{kind}: ")[1].split(";")[0]
                for kind in ("missing in the checkpoint", "unexpected", "wrongly shaped")
            )
            assert {"new", "newer"} <= set(missing.replace(",", " ").split()), text
            assert "b" in unexpected.replace(",", " ").replace(".", " ").split(), text
            for name, shape in (("c", "(30, 29)"), ("c", "(31, 29)"), ("d", "(7, 5, 3)"), ("d", "(5, 7, 3)")):
                assert name in misshapen, text
                assert shape in misshapen, text
            assert "strict=False" in text
            assert not {"a", "e"} & set(missing.replace(",", " ").split()), text


def lenient(rank: int, world: int, root: Path) -> None:
    """The rest is loaded; what does not match starts as in a new optimizer, with the weights that it has."""
    oracle_model, oracle = plain_of()
    train(oracle_model, oracle, range(SAVED_AT))
    for mode, kind in MODES.items():
        for name in (mode, "dcp"):
            for trained in (False, True):
                claim = f"{name} at {world} in {mode}, {trained=}"
                model, optimizer = changed(kind, trained)
                own = {key: value.clone() for key, value in model.state_dict().items()}
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    checkpoint.load(root / name, optimizer, model, strict=False)
                told = " ".join(str(warning.message) for warning in caught)
                for word in ("new", "newer", "b", "c", "d"):
                    assert word in told.replace(",", " ").split(), f"{claim}: {word} is not in the warning: {told}"
                found, expected = states_of(model, optimizer), states_of(oracle_model, oracle)
                for key in ("a", "e"):
                    assert_same(found[key], expected[key], f"{claim}: {key}")
                    assert_same(getattr(model, key).detach(), getattr(oracle_model, key).detach(), claim)
                for key in ("new", "newer", "c", "d"):
                    assert found[key] == {}, f"{claim}: {key} is not empty"
                    assert_same(getattr(model, key).detach(), own[key], f"{claim}: weights of {key}")
                twin, plain = twin_of(model, optimizer, oracle_model, oracle)
                train(model, optimizer, range(SAVED_AT, END))
                train(twin, plain, range(SAVED_AT, END))
                assert_same(dict(model.state_dict()), dict(twin.state_dict()), f"{claim}, trained")
                assert_same(states_of(model, optimizer), states_of(twin, plain), f"{claim}, trained")


def twin_of(model: Named, optimizer: Any, oracle_model: Named, oracle: AdamW) -> tuple[Named, AdamW]:
    """A plain optimizer in which "a" and "e" have their old state and the rest is new. The options of each group:"""
    lost, kept = options_of(oracle)
    wanted = [kept, lost, {**options_of(AdamW([torch.zeros(1)], lr=0.01))[0], "lr": 0.04}]
    assert_same(options_of(optimizer), wanted, "options")
    twin = Named(CHANGED)
    twin.load_state_dict(model.state_dict())
    plain = AdamW(made([{"of": group["of"]} for group in CHANGED_GROUPS], twin), lr=0.01)
    for group, options in zip(plain.param_groups, wanted, strict=True):
        group.update(options)
    for key in ("a", "e"):
        entry = oracle.state[getattr(oracle_model, key)]
        plain.state[getattr(twin, key)] = {name: value.clone() for name, value in entry.items()}
    return twin, plain


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.again), 4])
def test_a_lenient_load_takes_what_fits_by_name_and_starts_the_rest_empty(root, world):
    run_ranks(lenient, world, root, **LIMITS)


def shapes_of_nothing(rank: int, world: int, root: Path) -> None:
    """A checkpoint that was saved before any step has no state to tell shapes by. They count all the same."""
    for mode, kind in MODES.items():
        model = Named({**SHAPES, "c": (29, 30)}, seed=500)
        groups = [{"params": [(name, getattr(model, name)) for name in group["of"]]} for group in GROUPS]
        optimizer = ZeroRedundancyOptimizer(groups, AdamW, lr=0.01, **kind)
        before = bits_of(model, optimizer)
        error = error_of(lambda: checkpoint.load(root / f"{mode}-new", optimizer), mode)  # noqa: B023
        assert isinstance(error, ValueError), error
        assert "c (" in str(error)
        assert_same(bits_of(model, optimizer), before, mode)


def test_a_wrong_shape_is_found_even_if_the_checkpoint_has_no_state_for_it(root):
    run_ranks(shapes_of_nothing, 2, root, **LIMITS)


class Peaks(Optimizer):
    """Needs whole parameters: keeps one number of each, in a tensor of one element."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["peak"] = param.grad.abs().max().reshape(1)
                    param.sub_(param.grad * group["lr"] / self.state[param]["peak"])


def save_peaks(rank: int, world: int, directory: Path) -> None:
    model = Named(SHAPES)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Peaks)
    train(model, optimizer, range(1))
    checkpoint.save(directory / "own", optimizer, model)
    dcp.save(
        {"optim": optimizer.sharded_state_dict(model), "model": model.state_dict()}, checkpoint_id=directory / "dcp"
    )


def load_peaks(rank: int, world: int, directory: Path) -> None:
    """Rank by rank: those whose pieces are cut cannot take it, the others could. Nobody does."""
    for name in ("own", "dcp"):
        model = Named(SHAPES)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), Peaks)
        checkpoint.load(directory / name, optimizer, model)
        assert all(entry["peak"].shape == (1,) for entry in states_of(model, optimizer).values())
        # cut into pieces it fits nowhere: c and d are whole somewhere, a is not
        model = Named(SHAPES, seed=500)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, shard="element")
        before = bits_of(model, optimizer)
        error = error_of(lambda: checkpoint.load(directory / name, optimizer, model), name)  # noqa: B023
        assert isinstance(error, (ValueError, RuntimeError)), error
        assert "a" in str(error).replace("(", " ").replace(",", " ").split(), error
        assert_same(bits_of(model, optimizer), before, f"{name}: rank {rank}")


def test_state_that_cannot_be_cut_is_refused_on_all_ranks_and_loads_where_parameters_are_whole(tmp_path):
    run_ranks(save_peaks, 3, tmp_path, **LIMITS)
    run_ranks(load_peaks, 2, tmp_path, **LIMITS)


# --- frozen and unfrozen --------------------------------------------------------------------------------------------


def unfrozen(rank: int, world: int, root: Path) -> None:
    """A frozen parameter has no state. Unfrozen since, it starts empty; the others go on. No name is missing."""
    for mode, kind in MODES.items():
        oracle_model, oracle = plain_of(frozen="ae")
        train(oracle_model, oracle, range(SAVED_AT))
        model = Named(SHAPES, frozen="e", seed=500)
        optimizer = sharded(model, **kind)
        checkpoint.load(root / "frozen", optimizer, model)
        assert_same(states_of(model, optimizer), states_of(oracle_model, oracle), mode)
        oracle_model.a.requires_grad_(True)
        train(model, optimizer, range(SAVED_AT, END))
        train(oracle_model, oracle, range(SAVED_AT, END))
        assert_same(dict(model.state_dict()), dict(oracle_model.state_dict()), f"{mode}: trained")
        assert_same(states_of(model, optimizer), states_of(oracle_model, oracle), f"{mode}: trained")


def test_a_parameter_that_was_unfrozen_since_starts_empty(root):
    run_ranks(unfrozen, 3, root, **LIMITS)


def frozen_since(rank: int, world: int, root: Path) -> None:
    """The moments of a parameter that is frozen now are kept, as in plain torch, for when it is unfrozen."""
    for mode, kind in MODES.items():
        oracle_model, oracle = plain_of()
        train(oracle_model, oracle, range(SAVED_AT))
        model = Named(SHAPES, frozen="ac", seed=500)
        optimizer = sharded(model, **kind)
        checkpoint.load(root / mode, optimizer, model)
        for steps, frozen in ((range(3, 5), True), (range(5, 7), False)):
            for one in (model, oracle_model):
                one.a.requires_grad_(not frozen)
                one.c.requires_grad_(not frozen)
            train(model, optimizer, steps)
            train(oracle_model, oracle, steps)
        assert_same(dict(model.state_dict()), dict(oracle_model.state_dict()), mode)
        assert_same(states_of(model, optimizer), states_of(oracle_model, oracle), mode)


def test_the_moments_of_a_parameter_that_is_frozen_now_are_kept(root):
    run_ranks(frozen_since, 3, root, **LIMITS)


def left_out(rank: int, world: int, root: Path) -> None:
    """An optimizer over the trainable ones only; later over all: what was left out is missing by name."""
    few: Groups = ({"of": "ab", "lr": 0.02}, {"of": "d"})
    model = Named(SHAPES)
    optimizer = sharded(model, few)
    train(model, optimizer, range(SAVED_AT))
    checkpoint.save(root / "few", optimizer, model)
    expected = states_of(model, optimizer)
    for mode, kind in MODES.items():
        model = Named(SHAPES, seed=500)
        optimizer = sharded(model, **kind)
        error = error_of(lambda: checkpoint.load(root / "few", optimizer, model), mode)  # noqa: B023
        assert "missing in the checkpoint: c, e." in str(error), error
        checkpoint.load(root / "few", optimizer, model, strict=False)
        assert_same(states_of(model, optimizer), expected, mode)


def test_parameters_that_were_not_in_the_optimizer_are_missing_by_name(tmp_path):
    run_ranks(left_out, 3, tmp_path, **LIMITS)


# --- without a model ------------------------------------------------------------------------------------------------


def without_model(rank: int, world: int, root: Path) -> None:
    """Names that the optimizer was built with; positions if there are none; never one for the other."""
    expected_model = Named(SHAPES)
    expected = AdamW(expected_model.parameters(), lr=0.01)
    train(expected_model, expected, range(2))

    model = Named(SHAPES)
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), AdamW, lr=0.01)
    train(model, optimizer, range(2))
    checkpoint.save(root / "names", optimizer)
    other = Named(dict(reversed(SHAPES.items())))
    loaded = ZeroRedundancyOptimizer(other.named_parameters(), AdamW, lr=0.7)
    checkpoint.load(root / "names", loaded)
    assert_same(states_of(other, loaded), states_of(expected_model, expected), "by the optimizer's names")
    assert loaded.param_groups[0]["param_names"] == list("edcba")
    loaded = ZeroRedundancyOptimizer(other.parameters(), AdamW, lr=0.7)
    checkpoint.load(root / "names", loaded, other, strict=False)  # (the model's weights are missing)
    assert_same(states_of(other, loaded), states_of(expected_model, expected), "by the model's names")

    model = Named(SHAPES)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01)
    train(model, optimizer, range(2))
    checkpoint.save(root / "positions", optimizer)
    other = Named(SHAPES)
    loaded = ZeroRedundancyOptimizer(other.parameters(), AdamW, lr=0.7)
    checkpoint.load(root / "positions", loaded)
    assert_same(states_of(other, loaded), states_of(expected_model, expected), "by position")

    loaded = ZeroRedundancyOptimizer(other.parameters(), AdamW, lr=0.7)
    checkpoint.load(root / "positions", loaded, other, strict=False)  # (the model's weights are missing)
    assert_same(states_of(other, loaded), states_of(expected_model, expected), "by position, although there is a model")

    before = bits_of(other, loaded)
    regrouped = sharded(other)
    for name, optimizer, given in (("positions", regrouped, other), ("names", loaded, None)):
        error = error_of(lambda: checkpoint.load(root / name, optimizer, given), name)  # noqa: B023
        assert isinstance(error, ValueError), error
        assert "has positions" in str(error), error
        assert "model=" in str(error), error
    stranger = Named(SHAPES)
    error = error_of(lambda: checkpoint.load(root / "names", loaded, stranger), "a model of somebody else")
    assert isinstance(error, ValueError)
    assert_same(bits_of(other, loaded), before, "after the errors")


def test_names_come_from_the_model_or_the_optimizer_and_are_never_confused_with_positions(tmp_path):
    run_ranks(without_model, 2, tmp_path, **LIMITS)


# --- names with the prefixes of wrappers ----------------------------------------------------------------------------

PREFIXES = ("module.", "_orig_mod.", "_forward_module.module.", "module._orig_mod.", "_orig_mod.module.")


class Around(nn.Module):
    """A module of the user that calls the model ``module``, as DDP does, but is none: the name is part of the names."""

    def __init__(self, module: Named) -> None:
        super().__init__()
        self.module = module


def saved_from_wrapped_models(rank: int, world: int, root: Path) -> None:
    """As older versions saved what Fabric wraps, and as users save ``ddp.state_dict()``: the plain model loads it."""
    model = Named(SHAPES)
    optimizer = sharded(model)
    train(model, optimizer, range(SAVED_AT))
    expected, weights = states_of(model, optimizer), dict(model.state_dict())
    form = optimizer.sharded_state_dict(model)
    for position, prefix in enumerate(PREFIXES):
        state = {prefix + name: entry for name, entry in form["state"].items()}
        groups = [{**group, "params": [prefix + name for name in group["params"]]} for group in form["param_groups"]]
        whole = {prefix + name: value for name, value in weights.items()}
        saved = {"model": whole, "optim": {"state": state, "param_groups": groups}}
        dcp.save(saved, checkpoint_id=root / str(position))
    checkpoint.save(root / "ours", optimizer, Around(model))  # with our list of checksums, names and shapes
    for name in [*map(str, range(len(PREFIXES))), "ours"]:
        fresh = Named(SHAPES, seed=500)
        loaded = sharded(fresh)
        checkpoint.load(root / name, loaded, fresh)
        assert_same(states_of(fresh, loaded), expected, name)
        assert_same(dict(fresh.state_dict()), weights, name)
        alone = Named(SHAPES, seed=500)
        checkpoint.load_model(root / name, alone)
        assert_same(dict(alone.state_dict()), weights, name)
    own = Around(Named(SHAPES, seed=500))  # where the name is the user's own it stays
    loaded = ZeroRedundancyOptimizer(made(GROUPS, own.module), AdamW, lr=0.01)
    checkpoint.load(root / "ours", loaded, own)
    assert_same(states_of(own.module, loaded), expected, "the user's own module")
    # The form itself, for users who call DCP; and names that the optimizer was built with.
    fresh = Named(SHAPES, seed=500)
    loaded = ZeroRedundancyOptimizer([("_forward_module.module." + n, p) for n, p in fresh.named_parameters()], AdamW)
    assert list(loaded.sharded_state_dict()["state"]) == list(SHAPES)
    loaded.load_sharded_state_dict(saved["optim"], strict=False)
    assert_same(states_of(fresh, loaded), expected, "load_sharded_state_dict")
    # Two that fit are none.
    dcp.save({"model": {**whole, **{f"module.{n}": v for n, v in weights.items()}}}, checkpoint_id=root / "two")
    with pytest.raises(ValueError, match="missing in the checkpoint: a of the model"):
        checkpoint.load_model(root / "two", Named(SHAPES))


@pytest.mark.parametrize("world", [2, 3])
def test_names_with_a_wrappers_prefix_load_into_the_plain_model(world, tmp_path):
    run_ranks(saved_from_wrapped_models, world, tmp_path, **LIMITS)


# --- load_sharded_state_dict ----------------------------------------------------------------------------------------


def sharded_dicts(rank: int, world: int, root: Path) -> None:
    """The same rules for users who call DCP themselves; and an error of one rank is everybody's."""
    for mode, kind in MODES.items():
        model, optimizer = changed(kind, trained=True)
        before = bits_of(model, optimizer)
        form = optimizer.sharded_state_dict(model)
        with pytest.raises(CheckpointException):
            dcp.load({"optim": form}, checkpoint_id=root / mode)
        assert_same(bits_of(model, optimizer), before, f"{mode}: dcp.load")

        twin = Named({**SHAPES, "extra": (3,)}, seed=700)
        other = sharded(twin, [*GROUPS, {"of": ["extra"]}], **kind)
        train(twin, other, range(2))
        strange = other.sharded_state_dict(twin)
        error = error_of(lambda: optimizer.load_sharded_state_dict(strange, model), mode)  # noqa: B023
        assert isinstance(error, ValueError), error
        for word in ("new", "newer", "b", "extra"):
            assert word in str(error).replace(",", " ").replace(".", " ").replace(";", " ").split(), error
        assert_same(bits_of(model, optimizer), before, f"{mode}: load_sharded_state_dict")

        if rank == world - 1:
            form["param_groups"][0]["params"][0] = "misspelt"
        error = error_of(lambda: optimizer.load_sharded_state_dict(form, model), f"{mode}: one rank only")  # noqa: B023
        assert "misspelt" in str(error), error
        assert_same(bits_of(model, optimizer), before, f"{mode}: one rank only")


def test_load_sharded_state_dict_lists_names_and_changes_nothing_if_any_rank_fails(root):
    run_ranks(sharded_dicts, 3, root, **LIMITS)


def lenient_sharded_dicts(rank: int, world: int, root: Path) -> None:
    """strict=False with DCP's own partial load: places that nothing was loaded into start empty."""
    planner = dcp.DefaultLoadPlanner
    oracle_model, oracle = plain_of()
    train(oracle_model, oracle, range(SAVED_AT))
    expected = states_of(oracle_model, oracle)
    shapes = {**{name: SHAPES[name] for name in "eca"}, "new": (9, 4)}
    for mode, kind in MODES.items():
        model = Named(shapes, seed=500)
        optimizer = sharded(model, ({"of": ["new", "c"]}, {"of": "ae"}), **kind)
        form = optimizer.sharded_state_dict(model)
        dcp.load(
            {"optim": {"state": form["state"]}}, checkpoint_id=root / mode, planner=planner(allow_partial_load=True)
        )
        optimizer.load_sharded_state_dict(form, model, strict=False)
        found = states_of(model, optimizer)
        assert found["new"] == {}, mode
        assert_same({name: found[name] for name in "eca"}, {name: expected[name] for name in "eca"}, mode)


def test_places_that_nothing_was_loaded_into_start_empty(root):
    run_ranks(lenient_sharded_dicts, 3, root, **LIMITS)

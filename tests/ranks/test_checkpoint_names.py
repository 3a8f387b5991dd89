"""Checkpoints by name: what becomes of moments and options when the model or its groups have changed since.

Oracle: the plain optimizer over the same names, never interrupted. Gradients depend on the name alone, are the same on
every rank, and have few bits, so that their mean over any number of ranks is exact: everything is compared bit by bit.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.checkpoints import everything_in
from tests.harness import run_ranks
from tests.oracle import assert_same, error_of

SAVED_AT, END = 3, 6
MODES: tuple[dict[str, Any], ...] = ({"shard": "element"}, {"shard": "tensor"}, {"shard_gradients": True})
SHAPES = {"a": (40, 33), "b": (13,), "c": (30, 29), "d": (7, 5, 3), "e": ()}
GROUPS = ({"of": "ab", "lr": 0.02, "weight_decay": 0.3}, {"of": "cde", "lr": 0.05, "betas": (0.8, 0.95)})
Groups = Sequence[Mapping[str, Any]]


def noise(name: str, shape: Iterable[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


class Named(nn.Module):
    """Parameters by name. ``forward`` is the loss of a step, and gives each a gradient that belongs to its name."""

    def __init__(self, shapes: Mapping[str, Sequence[int]] = SHAPES, seed: int = 0) -> None:
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, Parameter(noise(name, shape, seed)))

    def forward(self, step: int) -> Tensor:
        params = self.named_parameters()
        return sum((param * (noise(name, param.shape, 100 + step) * 4).round() / 4).sum() for name, param in params)


def made(groups: Groups, model: Named) -> list[dict[str, Any]]:
    options = [{key: group[key] for key in group if key != "of"} for group in groups]
    return [
        {**own, "params": [getattr(model, name) for name in group["of"]]}
        for own, group in zip(options, groups, strict=True)
    ]


def sharded(model: Named, groups: Groups = GROUPS, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(made(groups, model), AdamW, lr=0.01, **options)


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()


def oracle_after(steps: int) -> tuple[Named, AdamW]:
    model = Named()
    optimizer = AdamW(made(GROUPS, model), lr=0.01)
    train(model, optimizer, range(steps))
    return model, optimizer


def states_of(model: nn.Module, optimizer: Any) -> dict[str, dict[str, Any]]:
    """The whole state of every parameter by name. Collective for ours."""
    entry = optimizer.full_state if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer.state.get
    return {name: dict(entry(param) or {}) for name, param in model.named_parameters()}


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


# --- one checkpoint for all -------------------------------------------------------------------------------------------


def save(rank: int, world: int, root: Path) -> None:
    model = Named()
    optimizer = sharded(model)
    checkpoint.save(root / "new", optimizer, model)
    train(model, optimizer, range(SAVED_AT))
    checkpoint.save(root / "trained", optimizer, model)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("names")
    run_ranks(save, 3, root)
    return root


def reordered(rank: int, world: int, root: Path) -> None:
    """Groups, and parameters in groups and in the model, in another order; groups split in two."""
    orders: tuple[Groups, ...] = (
        ({"of": "edc", "lr": 9.0}, {"of": "ba", "lr": 9.0}),
        ({"of": "d"}, {"of": "b"}, {"of": "ce"}, {"of": "a"}),
        GROUPS,
    )
    first, second = options_of(oracle_after(0)[1])
    for kind, groups in zip(MODES, orders, strict=True):
        claim = f"{groups} in {kind}"
        model = Named({key: SHAPES[key] for key in "dbeca"}, seed=500)
        optimizer = sharded(model, groups, **kind)
        checkpoint.load(root / "trained", optimizer, model)
        for group, options in zip(groups, options_of(optimizer), strict=True):
            assert_same(options, first if group["of"][0] in "ab" else second, claim)
        train(model, optimizer, range(SAVED_AT, END))
        oracle_model, oracle = oracle_after(END)
        assert_same(dict(model.state_dict()), dict(oracle_model.state_dict()), claim)
        assert_same(states_of(model, optimizer), states_of(oracle_model, oracle), claim)
    # Parameters of two groups in one: nobody knows which options to take, so it keeps its own, if that is asked for.
    model = Named(seed=500)
    optimizer = sharded(model, ({"of": "abcde", "lr": 0.7},))
    checkpoint.load(root / "trained", optimizer, model, strict=False)
    assert_same(states_of(model, optimizer), states_of(*oracle_after(SAVED_AT)), "joined")
    assert optimizer.param_groups[0]["lr"] == 0.7


def test_moments_and_options_follow_names_whatever_the_order_of_groups(root):
    run_ranks(reordered, 2, root)


# --- added, removed, misshapen ----------------------------------------------------------------------------------------

# b is gone, new and newer have come, c has other rows, d has its elements in another shape, e is no scalar any more
CHANGED = {"new": (9, 4), "a": (40, 33), "c": (31, 29), "d": (5, 7, 3), "e": (5,), "newer": (17,)}
CHANGED_GROUPS: Groups = ({"of": ["newer", "c", "e", "d"]}, {"of": ["a"]}, {"of": ["new"], "lr": 0.04})


def changed(kind: Mapping[str, Any]) -> tuple[Named, ZeroRedundancyOptimizer]:
    """A trained one: what it has is not to be touched, or is to be forgotten."""
    model = Named(CHANGED, seed=500)
    optimizer = sharded(model, CHANGED_GROUPS, **kind)
    train(model, optimizer, range(20, 22))
    return model, optimizer


def strict(rank: int, world: int, root: Path) -> list[str]:
    told = []
    for kind, name in zip(MODES, ("trained", "new", "trained"), strict=True):  # "new": no state to tell shapes by
        model, optimizer = changed(kind)
        before = everything_in(model, optimizer)
        error = error_of(lambda: checkpoint.load(root / name, optimizer, model))  # noqa: B023
        assert isinstance(error, ValueError), error
        told.append(str(error))
        assert_same(everything_in(model, optimizer), before, f"{kind}: changed")
    return told


def test_a_strict_load_lists_everything_that_does_not_match_and_changes_nothing_on_any_rank(root):
    for text in {text for told in run_ranks(strict, 3, root) for text in told}:
        kinds = ("missing in the checkpoint", "unexpected")
        missing, unexpected = (text.split(f"{kind}: ")[1].split(";")[0].replace(",", " ").split() for kind in kinds)
        assert {"new", "newer"} <= set(missing), text
        assert not {"a", "c", "d", "e"} & set(missing), text
        assert "b" in unexpected, text
        for name, was, now in (("c", (30, 29), (31, 29)), ("d", (7, 5, 3), (5, 7, 3)), ("e", (), (5,))):
            shapes = re.escape(str(was)), re.escape(str(now))
            assert re.search(rf"\b{name} \(saved (as|for) {shapes[0]}, is {shapes[1]}\)", text), text
        assert "strict=False" in text


def lenient(rank: int, world: int, root: Path) -> None:
    """What fits is loaded; the rest starts as in a new optimizer, with the weights that it has."""
    oracle_model, oracle = oracle_after(SAVED_AT)
    for kind in MODES:
        model, optimizer = changed(kind)
        expected = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.warns(UserWarning, match="does not match") as caught:
            checkpoint.load(root / "trained", optimizer, model, strict=False)
        told = " ".join(str(warning.message) for warning in caught).replace(",", " ").split()
        assert {"new", "newer", "b", "c", "d", "e"} <= set(told), told
        expected["a"] = oracle_model.a.detach()
        assert_same(dict(model.state_dict()), expected, f"{kind}: weights")
        states = states_of(model, optimizer)
        assert_same(states.pop("a"), states_of(oracle_model, oracle)["a"], f"{kind}: state")
        assert not any(states.values()), f"{kind}: {states}"
        first, second = options_of(oracle)
        assert_same(options_of(optimizer)[:2], [second, first], f"{kind}: options")
        assert optimizer.param_groups[2]["lr"] == 0.04
        train(model, optimizer, range(2))


def test_a_lenient_load_takes_what_fits_by_name_and_starts_the_rest_empty(root):
    run_ranks(lenient, 2, root)


# --- whose names ------------------------------------------------------------------------------------------------------


def without_model(rank: int, world: int, root: Path) -> None:
    """Names that the optimizer was built with; positions if there are none; never one for the other."""
    expected_model = Named()
    expected = AdamW(expected_model.parameters(), lr=0.01)
    train(expected_model, expected, range(2))
    for name, given in (("names", nn.Module.named_parameters), ("positions", nn.Module.parameters)):
        model = Named()
        optimizer = ZeroRedundancyOptimizer(given(model), AdamW, lr=0.01)
        train(model, optimizer, range(2))
        checkpoint.save(root / name, optimizer)
        other = Named(dict(reversed(SHAPES.items()))) if name == "names" else Named()
        for params, passed in ((given(other), None), (other.parameters(), other)):
            loaded = ZeroRedundancyOptimizer(params, AdamW, lr=0.7)
            checkpoint.load(root / name, loaded, passed, strict=False)
            assert_same(states_of(other, loaded), states_of(expected_model, expected), f"{name}, {passed}")
    error = error_of(lambda: checkpoint.load(root / "positions", sharded(other), other))  # in two groups
    assert isinstance(error, ValueError)
    assert "has positions" in str(error)


def test_names_come_from_the_model_or_the_optimizer_and_are_never_confused_with_positions(tmp_path):
    run_ranks(without_model, 2, tmp_path)


def test_names_that_are_digits_are_names(tmp_path):
    """A ParameterList calls its parameters "0" and "1"; in groups of another order they are still these."""
    model = nn.ParameterList([torch.zeros(4), torch.zeros(4)])
    first, second = model
    saved = SGD([{"params": [first]}, {"params": [second]}], lr=0.1, momentum=0.9)
    first.grad, second.grad = torch.ones(4), torch.full((4,), 2.0)
    saved.step()
    checkpoint.save(tmp_path / "c", saved, model)
    swapped = SGD([{"params": [second]}, {"params": [first]}], lr=0.1, momentum=0.9)
    checkpoint.load(tmp_path / "c", swapped, model)
    assert torch.equal(swapped.state[first]["momentum_buffer"], torch.ones(4))
    assert torch.equal(swapped.state[second]["momentum_buffer"], torch.full((4,), 2.0))


PREFIXES = ("module.", "_orig_mod.", "_forward_module.module.", "_orig_mod.module.")


def saved_from_wrapped_models(rank: int, world: int, root: Path) -> None:
    """As older versions saved what Fabric wraps, and as users save ``ddp.state_dict()``: the plain model loads it."""
    model = Named()
    optimizer = sharded(model)
    train(model, optimizer, range(SAVED_AT))
    expected, weights = states_of(model, optimizer), dict(model.state_dict())
    form = optimizer.sharded_state_dict(model)
    for prefix in PREFIXES:
        state = {prefix + name: entry for name, entry in form["state"].items()}
        groups = [{**group, "params": [prefix + name for name in group["params"]]} for group in form["param_groups"]]
        whole = {prefix + name: value for name, value in weights.items()}
        dcp.save({"model": whole, "optim": {"state": state, "param_groups": groups}}, checkpoint_id=root / prefix)
    for name in PREFIXES:
        fresh, alone = Named(seed=500), Named(seed=500)
        loaded = sharded(fresh)
        checkpoint.load(root / name, loaded, fresh)
        assert_same(states_of(fresh, loaded), expected, name)
        checkpoint.load_model(root / name, alone)
        for found in (fresh, alone):
            assert_same(dict(found.state_dict()), weights, name)
    # Two that fit are none.
    dcp.save({"model": {**whole, **{f"module.{n}": v for n, v in weights.items()}}}, checkpoint_id=root / "two")
    with pytest.raises(ValueError, match="missing in the checkpoint: a of the model"):
        checkpoint.load_model(root / "two", Named())


def test_names_with_a_wrappers_prefix_load_into_the_plain_model(tmp_path):
    run_ranks(saved_from_wrapped_models, 2, tmp_path)

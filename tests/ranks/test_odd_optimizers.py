"""Optimizers with habits of their own: what the sweep over other packages found, each in a few lines."""

from __future__ import annotations

import logging
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardstep import ZeroRedundancyOptimizer, checkpoint
from shardstep.tools import cli
from tests.harness import run_ranks
from tests.oracle import assert_same, error_of, parameters, train, values_of


class Habit(torch.optim.Optimizer):
    """Momentum, and what the subclasses add."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                self.update(param, self.state[param], group)
        return loss

    def update(self, param: torch.Tensor, state: dict, group: dict) -> None:
        moment = state.setdefault("moment", torch.zeros_like(param))
        param.sub_(moment.mul_(0.9).add_(param.grad), alpha=group["lr"])


# --- closures ---------------------------------------------------------------------------------------------------------


class LooksAhead(Habit):
    """Moves the weights, asks the closure there, and moves on from where it was. (Schedule-free closures do so.)"""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        before = [param.clone() for param in params]
        for param in params:
            if "moment" in self.state[param]:
                param.data.sub_(self.state[param]["moment"], alpha=0.5)
        with torch.enable_grad():
            loss = closure()
        for param, value in zip(params, before, strict=True):
            param.data.copy_(value)
        super().step()
        return loss


def closures(rank: int, world_size: int, shapes: list[tuple[int, ...]], mode: dict[str, Any]) -> None:
    ours, theirs = parameters(shapes), parameters(shapes)
    optimizers = ZeroRedundancyOptimizer(ours, LooksAhead, **mode), LooksAhead(theirs)
    for _ in range(4):
        losses = []
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):

            def closure(params=params, optimizer=optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss = torch.stack([param.sum() for param in params]).sum().square()  # every gradient needs all weights
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
        assert_same(*losses, "losses")
    assert_same(values_of(ours), values_of(theirs), "weights")


@pytest.mark.parametrize("shapes", [[(7, 5), (3,), (4, 4)], [(3, 2)]], ids=["several", "one: ranks that own nothing"])
@pytest.mark.parametrize("mode", [{"shard": "tensor"}, {}, {"parameters_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_closure_that_is_asked_about_moved_weights_sees_those_of_all_ranks(world_size, mode, shapes):
    """Before, it saw this rank's pieces moved and all others not, and trained to other weights."""
    run_ranks(closures, world_size, shapes, mode)


# --- options and states -----------------------------------------------------------------------------------------------


class Kind(Enum):
    PLAIN = 1
    DOUBLE = 2


class Kinds(Enum):
    OTHER = 1


class WithKind(Habit):
    def update(self, param: torch.Tensor, state: dict, group: dict) -> None:
        super().update(param, state, {"lr": group["lr"] * group["kind"].value})


def enumerations(rank: int, world_size: int, directory: Path) -> None:
    params = parameters()
    opt = ZeroRedundancyOptimizer(params, WithKind, kind=Kind.DOUBLE)
    train(opt, params, range(2))
    checkpoint.save(directory / "kind", opt)
    plain = WithKind(parameters(), kind=Kind.PLAIN)
    for fresh in (ZeroRedundancyOptimizer(parameters(), WithKind, kind=Kind.PLAIN), plain):
        checkpoint.load(directory / "kind", fresh)
        assert all(group["kind"] is Kind.DOUBLE for group in fresh.param_groups)
    other = ZeroRedundancyOptimizer(parameters(), WithKind, kind=Kinds.OTHER)
    assert "DOUBLE" in str(error_of(lambda: checkpoint.load(directory / "kind", other)))
    assert other.param_groups[0]["kind"] is Kinds.OTHER


def test_an_option_that_is_a_member_of_an_enumeration_is_saved_by_name(tmp_path, capsys):
    run_ranks(enumerations, 2, tmp_path)
    assert cli.main(["convert", str(tmp_path / "kind"), str(tmp_path / "plain.pt")]) == 2
    assert "'kind' as 'DOUBLE'" in capsys.readouterr().err
    assert not (tmp_path / "plain.pt").exists()


class WithFunction(Habit):
    def update(self, param: torch.Tensor, state: dict, group: dict) -> None:
        super().update(param, state, {"lr": group["function"](group["lr"])})


def double(value: float) -> float:
    return 2 * value


def functions(rank: int, world_size: int, directory: Path) -> None:
    params = parameters()
    opt = ZeroRedundancyOptimizer(params, WithFunction, function=double)
    train(opt, params, range(2))
    checkpoint.save(directory / "function", opt)
    fresh = ZeroRedundancyOptimizer(again := parameters(), WithFunction, function=double)
    checkpoint.load(directory / "function", fresh)
    for param, value in zip(again, params, strict=True):
        param.data.copy_(value)
    train(opt, params, range(2, 4))
    train(fresh, again, range(2, 4))
    assert_same(values_of(again), values_of(params), "goes on with its own function")


def test_an_option_that_is_a_function_is_the_live_optimizers_and_no_plain_file_is_made_without_it(tmp_path, capsys):
    run_ranks(functions, 2, tmp_path)
    assert cli.main(["convert", str(tmp_path / "function"), str(tmp_path / "plain.pt")]) == 2
    assert "'function' as 'double'" in capsys.readouterr().err


class Transposed(Habit):
    """Keeps a matrix whose dimensions lie the other way round in memory, as eigenvectors do, alone and in a list."""

    def update(self, param: torch.Tensor, state: dict, group: dict) -> None:
        super().update(param, state, group)
        if "basis" not in state:
            size = max(param.numel() % 7, 2)
            state["basis"] = torch.arange(size * 3, dtype=param.dtype).view(3, size).t()
            state["more"] = [state["basis"].clone(), torch.ones(2, 3, 4, dtype=param.dtype).permute(2, 0, 1)]
        state["basis"].add_(1)


def layout_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.stride(), value
    return [layout_of(item) for item in value] if isinstance(value, list) else value


def memory_orders(rank: int, world_size: int, directory: Path) -> None:
    params, theirs = parameters(), parameters()
    opt, plain = ZeroRedundancyOptimizer(params, Transposed), Transposed(theirs)
    train(opt, params, range(2))
    train(plain, theirs, range(2))
    checkpoint.save(directory / "order", opt)
    checkpoint.save(directory / "later", opt, asynchronous=True).wait()
    opt.consolidate_state_dict()
    for source in ("order", "later", "collected"):
        fresh = ZeroRedundancyOptimizer(again := parameters(), Transposed)
        if source == "collected":
            form = [opt.state_dict()]
            dist.broadcast_object_list(form)
            fresh.load_state_dict(form[0])
        else:
            checkpoint.load(directory / source, fresh)
        for one, other in zip(again, theirs, strict=True):
            found, expected = fresh.full_state(one), plain.state[other]
            assert found.keys() == expected.keys()
            assert not expected["basis"].is_contiguous(), "the case that this test is about"
            for key in expected:
                assert_same(layout_of(found[key]), layout_of(expected[key]), f"{source}: {key}")
        owned = [entry for entry in fresh.optim.state.values() if entry]
        assert all(not entry["basis"].is_contiguous() for entry in owned)


@pytest.mark.parametrize("world_size", [1, 3])
def test_state_that_lies_otherwise_in_memory_comes_back_as_it_lay(world_size, tmp_path):
    """Matrix products round otherwise if it does not: training would go on with other last bits."""
    run_ranks(memory_orders, world_size, tmp_path)


class CountsOnTheGroup(Habit):
    """Counts its steps on the group, unless that is empty, and steps ever shorter. So does heavyball's SFAdamW."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in (group for group in self.param_groups if group["params"]):
            group["count"] = group.get("count", torch.zeros(())) + 1
        return super().step(closure)

    def update(self, param: torch.Tensor, state: dict, group: dict) -> None:
        super().update(param, state, {"lr": group["lr"] / float(group["count"])})


def count_on_groups(rank: int, world_size: int, directory: Path) -> None:
    def groups(params: list) -> list[dict]:
        return [{"params": params[:1]}, {"params": params[1:2], "lr": 0.2}]  # a rank has one of them, or none

    shapes = [(9, 5), (7, 3)]
    params, theirs = parameters(shapes), parameters(shapes)
    opt = ZeroRedundancyOptimizer(groups(params), CountsOnTheGroup, shard="tensor")
    plain = CountsOnTheGroup(groups(theirs))
    train(opt, params, range(3))
    train(plain, theirs, range(3))
    checkpoint.save(directory / "count", opt)
    opt.consolidate_state_dict(to=world_size - 1)
    form = [opt.state_dict()]
    dist.broadcast_object_list(form, src=world_size - 1)
    start = values_of(theirs)
    train(plain, theirs, range(3, 6))
    for source in ("checkpoint", "dict"):
        again = [torch.nn.Parameter(value.clone()) for value in start]
        fresh = ZeroRedundancyOptimizer(
            groups(again), CountsOnTheGroup, shard="element" if source == "dict" else "tensor"
        )
        if source == "dict":
            fresh.load_state_dict(form[0])
        else:
            checkpoint.load(directory / "count", fresh)
        train(fresh, again, range(3, 6))
        assert_same(values_of(again), values_of(theirs), source)


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_is_written_into_a_group_is_saved_by_a_rank_that_has_a_piece_of_it(world_size, tmp_path):
    run_ranks(count_on_groups, world_size, tmp_path)


class SharedCounter(Habit):
    """Keeps a tensor under a key that is no parameter. (MADGRAD does.)"""

    def step(self, closure: Any = None) -> Any:
        self.state["k"] = self.state.get("k", torch.zeros(())).add_(1)
        return super().step(closure)


def untouched(rank: int, world_size: int) -> None:
    theirs = parameters()
    plain = SharedCounter(theirs)
    train(plain, theirs, range(2))
    form = plain.state_dict()
    params = parameters()
    opt = ZeroRedundancyOptimizer(params, SharedCounter)
    opt.load_state_dict(form)
    train(opt, params, range(2, 5))
    assert float(form["state"]["k"]) == 2


def test_a_loaded_dict_is_not_changed_by_later_steps_also_under_keys_that_are_no_parameters():
    run_ranks(untouched, 2)


# --- refused when they are built --------------------------------------------------------------------------------------


class Talks(Habit):
    def update(self, param: torch.Tensor, state: dict, group: dict) -> None:
        dist.all_reduce(param.grad)
        super().update(param, state, group)


class HasInner(Habit):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.base_optimizer = torch.optim.AdamW(self.param_groups)


class ClipsLarge(Habit):
    """Clips all gradients together, if they are very large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        grads = [param.grad for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
        torch._foreach_mul_(grads, float((100 / norm).clamp(max=1)))
        return super().step(closure)


class NoGroups(Habit):
    def __init__(self, params: Any) -> None:
        super().__init__([param.detach().requires_grad_() for param in params])


def refusals(rank: int, world_size: int) -> None:
    for kind, reason in (
        (Talks, "sends something"),
        (HasInner, "AdamW of its own inside"),
        (NoGroups, "groups"),
        (ClipsLarge, "others"),
    ):
        for shard in ("auto", "tensor"):
            error = error_of(lambda kind=kind, shard=shard: ZeroRedundancyOptimizer(parameters(), kind, shard=shard))
            assert isinstance(error, ValueError), error
            assert kind.__name__ in str(error)
            assert reason in str(error)


@pytest.mark.parametrize("world_size", [1, 3])
def test_optimizers_that_communicate_wrap_another_or_take_no_groups_are_refused_by_name(world_size):
    run_ranks(refusals, world_size)


# --- arguments of step ------------------------------------------------------------------------------------------------


class Wants(Habit):
    """A step with an argument that it needs: in the sweep's words, ``step(closure, loss)``."""

    def step(self, closure: Any = None, *, factor: float) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["factor"] = factor
        return super().step(closure)

    def update(self, param: torch.Tensor, state: dict, group: dict) -> None:
        param.grad.mul_(group["factor"])
        super().update(param, state, group)


class WantsInSecret(Wants):
    """The same with a default that does not do, as in torch's own test."""

    def step(self, closure: Any = None, factor: Any = None) -> Any:
        return super().step(closure, factor=factor.pop())


def step_with(kind: type, optimizer: torch.optim.Optimizer, params: list, numbers: range) -> None:
    for number in numbers:
        for position, param in enumerate(params):
            param.grad = torch.full_like(param, 0.1 * (number + position))
        optimizer.step(factor=[1.0 + number] if kind is WantsInSecret else 1.0 + number)  # type: ignore[call-arg]


def wants_an_argument(rank: int, world_size: int, kind: type, folder: Path) -> None:
    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[method-assign]
    logging.getLogger("shardstep").addHandler(handler)
    ours, theirs = parameters(), parameters()
    plain = kind([{"params": theirs[:2]}, {"params": theirs[2:], "lr": 0.05}])
    sharded = ZeroRedundancyOptimizer([{"params": ours[:2]}, {"params": ours[2:], "lr": 0.05}], kind)
    told = [line.getMessage() for line in lines]
    assert len(told) == (rank == 0), told  # once, not for every group and rank
    assert all("wants an argument (factor)" in text and "kept whole" in text for text in told), told
    assert not sharded.layout.cut_params
    step_with(kind, plain, theirs, range(3))
    step_with(kind, sharded, ours, range(3))
    assert_same(values_of(ours), values_of(theirs))
    sharded.consolidate_state_dict(to=0)
    if rank == 0:
        assert_same(sharded.state_dict()["state"], plain.state_dict()["state"])
    checkpoint.save(folder / "c", sharded, extra={"weights": values_of(ours)})
    ours = parameters()
    sharded = ZeroRedundancyOptimizer([{"params": ours[:2]}, {"params": ours[2:], "lr": 0.05}], kind)
    with torch.no_grad():
        for param, value in zip(ours, checkpoint.load(folder / "c", sharded)["weights"], strict=True):
            param.copy_(value)
    step_with(kind, plain, theirs, range(3, 6))
    step_with(kind, sharded, ours, range(3, 6))
    assert_same(values_of(ours), values_of(theirs))
    with pytest.raises(ValueError, match=r"shard='element' expects .* its step wants an argument"):
        ZeroRedundancyOptimizer(parameters(), kind, shard="element")


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("kind", [Wants, WantsInSecret])
def test_an_optimizer_whose_step_wants_an_argument_is_kept_whole_and_gets_it(kind, world_size, tmp_path):
    run_ranks(wants_an_argument, world_size, kind, tmp_path)

"""Optimizers inside the wrappers of frameworks are saved whole, or refused by name. Nothing is taken for what it isn't.

The frameworks' own programs are in tests/frameworks; here are their wrapper classes on ranks that do as the test says.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardstep import ZeroRedundancyOptimizer, checkpoint, hook_with_zero_step
from shardstep.checkpoint import claims
from tests.harness import run_ranks
from tests.oracle import assert_same, error_of, parameters, train, values_of

pytestmark = pytest.mark.extended  # ``make test-frameworks`` runs these, too
STEPS, MORE = range(3), range(3, 6)
# A name here is a way to wrap an optimizer; the packages are those of `make test-frameworks`, but for accelerate.
WRAPPERS = ["accelerate", *(pytest.param(name, marks=pytest.mark.frameworks) for name in ("lightning", "fabric"))]


def wrapped(how: str, optimizer: torch.optim.Optimizer) -> Any:
    if how == "accelerate":
        from accelerate import Accelerator

        rank = str(dist.get_rank())
        os.environ.update(WORLD_SIZE=str(dist.get_world_size()), RANK=rank, LOCAL_RANK=rank)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # asked for, not used: the group exists already
        return Accelerator(cpu=True).prepare(optimizer)
    if how == "lightning":
        from lightning.pytorch.core.optimizer import LightningOptimizer

        return LightningOptimizer(optimizer)
    from lightning.fabric.strategies import SingleDeviceStrategy
    from lightning.fabric.wrappers import _FabricOptimizer

    return _FabricOptimizer(optimizer, SingleDeviceStrategy())


def needs(how: str) -> None:
    package = "accelerate" if how == "accelerate" else "lightning"
    pytest.importorskip(package, reason=f"{package} is in the environment of make test-frameworks")


def sharded(shard: str = "auto") -> tuple[list[torch.nn.Parameter], ZeroRedundancyOptimizer]:
    params = parameters()
    return params, ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.1, shard=shard)


def oracle(steps: range) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    params = parameters()
    optimizer = torch.optim.AdamW(params, lr=0.1)
    train(optimizer, params, steps)
    return params, optimizer


def state_of(optimizer: Any) -> dict[int, Any]:
    states = optimizer.state_dict()["state"]
    return {key: dict(states[key]) for key in sorted(states)}


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save_and_resume(rank: int, world_size: int, how: str, shard: str, directory: Path) -> None:
    params, optimizer = sharded(shard)
    wrapper = wrapped(how, optimizer)
    train(optimizer, params, STEPS)
    if rank == world_size - 1:
        time.sleep(0.5)  # the case in which a late rank overwrote what the others had saved
    checkpoint.save(directory / "one", wrapper, extra={"step": 3})
    handle = checkpoint.save(directory / "two", wrapper, asynchronous=True)
    train(optimizer, params, MORE)
    assert handle.wait() == directory / "two"
    checkpoint.verify(directory / "one")
    for name in ("one", "two"):
        again, fresh = sharded(shard)
        for param, value in zip(again, oracle(STEPS)[0], strict=True):
            param.data.copy_(value)
        found = checkpoint.load(directory / name, wrapped(how, fresh))
        assert found == ({"step": 3} if name == "one" else {})
        train(fresh, again, MORE)
        assert_same(values_of(again), values_of(oracle(range(6))[0]), f"resumed from {name}")
    again, fresh = sharded(shard)
    assert checkpoint.resume(directory, wrapped(how, fresh))[0] == directory / "two"


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("shard", ["element", "tensor"])
@pytest.mark.parametrize("how", WRAPPERS)
def test_a_wrapped_optimizer_is_saved_by_all_ranks_together(how, shard, world_size, tmp_path):
    needs(how)
    run_ranks(save_and_resume, world_size, how, shard, tmp_path)


class Around(torch.optim.Optimizer):
    """A wrapper that nobody knows."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults


class Beside:
    """A wrapper that is no optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizers = [inner]


def refuse_unknown(rank: int, world_size: int, directory: Path) -> None:
    params, optimizer = sharded()
    plain = torch.optim.AdamW(params)
    for wrapper in (Around(optimizer), Beside(optimizer), Around(plain)):
        for call in (checkpoint.save, checkpoint.load, checkpoint.resume):
            error = error_of(lambda call=call, wrapper=wrapper: call(directory / "x", wrapper))
            assert isinstance(error, TypeError)
            assert type(wrapper).__name__ in str(error)
            assert type(getattr(wrapper, "inner", optimizer)).__name__ in str(error)
    assert isinstance(error_of(lambda: checkpoint.save(directory / "x", [optimizer])), TypeError)
    with pytest.raises(TypeError, match="Around"):
        hook_with_zero_step(None, None, Around(optimizer))
    assert not list(directory.iterdir())


def test_an_unknown_wrapper_is_refused_by_name_and_nothing_is_written(tmp_path):
    run_ranks(refuse_unknown, 2, tmp_path)


# --- plain optimizers that several ranks save -------------------------------------------------------------------------


def save_plain_together(rank: int, world_size: int, directory: Path, late: float) -> str:
    params, optimizer = oracle(STEPS)
    for param in params:
        optimizer.state[param]["exp_avg"].fill_(rank)  # everybody has another state
    if rank != 1:
        time.sleep(late)
    try:
        checkpoint.save(directory / "plain", optimizer)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("late", [0.0, 1.0])
def test_of_a_plain_optimizer_on_many_ranks_one_copy_is_saved_and_the_others_are_refused(late, tmp_path):
    """Together, and when the others come after the first has ended."""
    told = run_ranks(save_plain_together, 3, tmp_path, late)
    saved = [rank for rank, text in enumerate(told) if not text]
    assert len(saved) == 1
    assert late == 0.0 or saved == [1]
    for rank, text in enumerate(told):
        if text:
            assert f"rank {saved[0]} of this run" in text
            assert f"this is rank {rank}" in text
            assert late == 0.0 or "has saved" in text
    assert [path.name for path in tmp_path.iterdir()] == ["plain"], "nothing else is left"
    checkpoint.verify(tmp_path / "plain")
    fresh = torch.optim.AdamW(parameters())
    checkpoint.load(tmp_path / "plain", fresh)
    assert all((state["exp_avg"] == saved[0]).all() for state in fresh.state.values())


def save_plain_again(rank: int, world_size: int, directory: Path) -> None:
    _, optimizer = oracle(STEPS)
    checkpoint.save(directory / f"of-{rank}", optimizer)
    dist.barrier()
    if rank == 1:
        checkpoint.save(directory / "last", optimizer)
        checkpoint.save(directory / "last", optimizer)  # its own is replaced
        checkpoint.save(directory / "last", optimizer, asynchronous=True)  # and the next save waits for this one
        checkpoint.save(directory / "last", optimizer).wait()


def test_a_rank_replaces_its_own_checkpoint_and_that_of_an_earlier_run(tmp_path):
    for _ in range(2):
        run_ranks(save_plain_again, 2, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "of-0", "of-1"]
    # in another run another rank may save there
    told = run_ranks(save_plain_together, 3, tmp_path, 0.0)
    assert len([text for text in told if not text]) == 1


def claim_by_other_paths(rank: int, world_size: int, directory: Path) -> str:
    """Rank 0 holds the directory; the others come by another way to it, or from a host that has another one there."""
    (directory / "real").mkdir(exist_ok=True)
    if rank == 0:
        (directory / "link").symlink_to("real")
        held = claims.claim(directory / "real" / "x")
    dist.barrier()
    told = ""
    if rank == 1:
        told = str(error_of(lambda: claims.claim(directory / "link" / "x")))
    dist.barrier()
    if rank == 0:  # now its sign cannot be seen, as on another host
        (sign,) = (directory / "real").glob(".x.*.0.*.claim")
        sign.rename(directory / "elsewhere")
    dist.barrier()
    if rank == 1:
        claims.claim(directory / "real" / "x")
    dist.barrier()
    if rank == 2:  # on the same host as rank 1
        told = str(error_of(lambda: claims.claim(directory / "real" / "x")))
    dist.barrier()
    if rank == 0:
        held.release()
    return told


def test_a_claim_is_on_a_directory_not_on_its_name_and_hosts_may_have_one_each(tmp_path):
    told = run_ranks(claim_by_other_paths, 3, tmp_path)
    assert "rank 0 of this run is saving" in told[1]
    assert "rank 1 of this run is saving" in told[2]


def save_after_a_failure(rank: int, world_size: int, directory: Path) -> None:
    _, optimizer = oracle(STEPS)
    if rank == 0:
        error_of(lambda: checkpoint.save(directory / "x", optimizer, extra={"f": open}), "no plain data")
    dist.barrier()
    if rank == 1:
        checkpoint.save(directory / "x", optimizer)


def test_a_failed_save_leaves_the_directory_to_others(tmp_path):
    run_ranks(save_after_a_failure, 2, tmp_path)
    checkpoint.verify(tmp_path / "x")


# --- state dicts through a wrapper ------------------------------------------------------------------------------------


def stale_through_a_wrapper(rank: int, world_size: int, how: str) -> None:
    params, optimizer = sharded()
    wrapper = wrapped(how, optimizer)
    train(optimizer, params, STEPS)
    target = wrapper.optimizer if how == "accelerate" else wrapper  # (accelerate's wrapper does not pass methods on)
    target.consolidate_state_dict(to=0)
    assert bool(wrapper.state_dict()["state"]) == (rank == 0)
    train(optimizer, params, MORE)
    # Both know that what was collected is stale. (Fabric collects it anew whenever it is asked.)
    for one in (optimizer,) if how == "fabric" else (wrapper, optimizer):
        assert "consolidate_state_dict(to=0)" in str(error_of(one.state_dict, "stale"))
    target.consolidate_state_dict(to=0)
    collected = [target.state_dict()]  # on every rank: Fabric's collects
    dist.broadcast_object_list(collected)
    expected = oracle(range(6))[1]
    assert_same({k: dict(v) for k, v in collected[0]["state"].items()}, state_of(expected), "collected")
    # load through the wrapper: the optimizer inside has it, too
    _, fresh = sharded()
    inner = wrapped(how, fresh)
    inner.load_state_dict(collected[0])
    assert "consolidate_state_dict" in str(error_of(fresh.state_dict, "after a load there is state"))
    fresh.consolidate_state_dict(to=0)
    if rank == 0:
        assert_same(state_of(fresh), state_of(expected), "after a load through the wrapper")


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("how", WRAPPERS)
def test_what_was_collected_is_stale_after_a_step_whoever_asks(how, world_size):
    needs(how)
    run_ranks(stale_through_a_wrapper, world_size, how)


def change_through_a_wrapper(rank: int, world_size: int) -> None:
    params, optimizer = sharded()
    wrapper = wrapped("lightning", optimizer)
    train(optimizer, params, STEPS)
    more = torch.nn.Parameter(torch.ones(9, dtype=torch.float64))
    wrapper.add_param_group({"params": [more], "lr": 0.5})
    train(optimizer, [*params, more], MORE)
    assert more in optimizer.state
    assert optimizer.state is wrapper.state
    wrapper.state = {}  # torch's own optimizers take that
    assert not any(optimizer.state.values())


@pytest.mark.frameworks
def test_a_group_added_through_lightnings_wrapper_is_known_inside():
    needs("lightning")
    run_ranks(change_through_a_wrapper, 2)


# --- loaded first, wrapped then ---------------------------------------------------------------------------------------


def prepare_loaded(rank: int, world_size: int, shard: str) -> None:
    """Accelerate asks for the state, moves it, and loads it: nothing of it need be there for that."""
    _, plain = oracle(STEPS)
    params, optimizer = sharded(shard)
    for param, value in zip(params, oracle(STEPS)[0], strict=True):
        param.data.copy_(value)
    optimizer.load_state_dict(plain.state_dict())
    before = optimizer.memory().state
    wrapper = wrapped("accelerate", optimizer)
    assert optimizer.memory().state == before
    train(wrapper, params, MORE)
    assert_same(values_of(params), values_of(oracle(range(6))[0]), "trained")
    wrapped("accelerate", optimizer)  # also after a step
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):  # everybody else is told as ever
        wrapper.state_dict()
    optimizer.consolidate_state_dict()
    wrapped("accelerate", optimizer)  # and when somebody has collected it, which stays
    if rank == 0:
        assert_same(state_of(wrapper), state_of(oracle(range(6))[1]), "the state")


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("shard", ["element", "tensor"])
def test_an_optimizer_that_was_loaded_can_be_prepared_by_accelerate(shard, world_size):
    needs("accelerate")
    run_ranks(prepare_loaded, world_size, shard)


# --- who is told to consolidate ---------------------------------------------------------------------------------------


def told_to_consolidate(rank: int, world_size: int) -> None:
    params, optimizer = sharded()
    train(optimizer, params, STEPS)
    for recipient in (0, 2):
        if recipient:
            optimizer.consolidate_state_dict(to=recipient)
            train(optimizer, params, MORE)
        text = str(error_of(optimizer.state_dict, "not consolidated"))
        assert f"consolidate_state_dict(to={recipient})" in text, "the same advice on every rank"
        assert f"rank {recipient} is the one that saves" in text
        assert "shardstep.checkpoint.save" in text


def test_the_error_names_the_rank_that_saves_on_every_rank():
    run_ranks(told_to_consolidate, 3)


def collect_for_several(rank: int, world_size: int) -> None:
    params, optimizer = sharded()
    train(optimizer, params, STEPS)
    expected = state_of(oracle(STEPS)[1])
    for recipient in (2, 0):
        optimizer.consolidate_state_dict(to=recipient)
    optimizer.consolidate_state_dict(to=2)
    form = optimizer.state_dict()
    if rank in (0, 2):
        assert_same(state_of(optimizer), expected, f"rank {rank} keeps its copy")
    else:
        assert not form["state"]
        text = str(error_of(lambda: sharded()[1].load_state_dict(form)))
        assert "rank 0 or rank 2" in text
    if rank != 1:
        sharded()[1].load_state_dict(form)
    train(optimizer, params, MORE)
    error_of(optimizer.state_dict, "all copies are stale after a step")


def test_collecting_for_one_rank_after_another_drops_nobodys_copy():
    with pytest.raises(AssertionError, match="failed on rank 1"):  # (loading is collective: the refusal is everybody's)
        run_ranks(collect_for_several, 3)


# --- one directory, several savers ------------------------------------------------------------------------------------


def save_two_at_once(rank: int, world_size: int, directory: Path) -> list[str]:
    """One rank saves two optimizers in the background into one directory."""
    told = []
    if rank == 0:
        handles = []
        for _ in range(2):
            _, optimizer = oracle(STEPS)
            try:
                handles.append(checkpoint.save(directory / "x", optimizer, asynchronous=True))
            except RuntimeError as error:
                told.append(str(error))
        for handle in handles:
            handle.wait()
    return told


def test_two_saves_at_once_into_one_directory_do_not_mix(tmp_path):
    told = run_ranks(save_two_at_once, 2, tmp_path)[0]
    assert len(told) <= 1  # the first may have ended before the second began
    checkpoint.verify(tmp_path / "x")


def save_beside_a_group(rank: int, world_size: int, directory: Path) -> list[str]:
    """A sharded optimizer is saved by all, then a rank that is not its first saves a plain one over it."""
    params, optimizer = sharded()
    train(optimizer, params, STEPS)
    checkpoint.save(directory / "x", optimizer)
    told = []
    if rank == 1:
        told.append(str(error_of(lambda: checkpoint.save(directory / "x", oracle(STEPS)[1]))))
    dist.barrier()
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    part = ZeroRedundancyOptimizer(parameters(), torch.optim.AdamW, groups[min(rank, 1)])
    try:
        if rank > 0:
            checkpoint.save(directory / "x", part)
    except RuntimeError as error:
        told.append(str(error))
    return told


def test_another_rank_or_group_does_not_replace_what_a_group_has_saved(tmp_path):
    told = run_ranks(save_beside_a_group, 3, tmp_path)
    assert "rank 0 of this run has saved" in told[1][0]
    assert all("has saved" in texts[-1] for texts in told[1:])
    fresh = torch.optim.AdamW(parameters())
    checkpoint.load(tmp_path / "x", fresh)
    assert_same(state_of(fresh), state_of(oracle(STEPS)[1]), "what the group saved is there")


def keep_own(rank: int, world_size: int, directory: Path) -> None:
    _, optimizer = oracle(STEPS)
    for step in range(3):
        checkpoint.save(directory / f"step-{step}-rank-{rank}", optimizer, keep=1)


def test_keeping_the_newest_spares_what_other_ranks_have_saved(tmp_path):
    run_ranks(keep_own, 3, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-2-rank-{rank}" for rank in range(3)]

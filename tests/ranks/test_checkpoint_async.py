"""Asynchronous saves: the checkpoint holds the state of the call, whatever training does meanwhile.

Oracle: the plain optimizer on the same gradients, stopped at the step of the call. Bit-equal.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.harness import run_ranks
from tests.oracle import assert_same
from tests.surroundings import full_disk
from tests.twins import values

SMALL = [(96, 130), (41, 200), (7, 5), (3,), ()]
LARGE = [(900, 1000), (800, 1000), (50,), (1200, 900)]  # 67 MB with AdamW's state: a save takes some 100 ms
MODES: dict[str, dict[str, Any]] = {
    "element": {},
    "tensor": {"shard": "tensor"},
    "bucket views": {"parameters_as_bucket_view": True},
    "lazy": {"lazy_gather": True},
    "gradients": {"shard_gradients": True},
    "gradients, lazy": {"shard_gradients": True, "lazy_gather": True},
}


class Net(nn.Module):
    """Every parameter has a gradient that depends on its value and on the batch."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        for position, shape in enumerate(shapes):
            self.register_parameter(f"w{position}", nn.Parameter(values(shape, 100 + position)))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, number: int) -> Tensor:
        self.batches += 1
        return sum(((w + 0.7 * number + k).sin() * (k + 1)).sum() for k, w in enumerate(self.parameters()))  # type: ignore


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    """All ranks have the same batches: the mean of two gradients that are alike is the gradient, to the last bit."""
    for number in steps:
        optimizer.zero_grad()
        model(number).backward()
        optimizer.step()


def sharded(model: nn.Module, kind: Any = AdamW, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), kind, lr=1e-2, **options)


def oracle_at(shapes: list[tuple[int, ...]], steps: int) -> tuple[Net, Optimizer]:
    model = Net(shapes)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(steps))
    return model, optimizer


def assert_holds(path: Path, shapes: list[tuple[int, ...]], steps: int, claim: str = "") -> None:
    """A plain optimizer in this process loads it and is where the oracle is."""
    checkpoint.verify(path)
    model = Net(shapes)
    optimizer = AdamW(model.parameters(), lr=1.0)
    assert checkpoint.load(path, optimizer, model)["step"] == steps, claim
    expected_model, expected = oracle_at(shapes, steps)
    assert_same(dict(model.state_dict()), dict(expected_model.state_dict()), f"{claim}, {path.name}")
    assert_same(optimizer.state_dict(), expected.state_dict(), f"{claim}, {path.name}")


# --- the state of the call ----------------------------------------------------------------------------------------


def train_meanwhile(rank: int, world: int, parent: Path, mode: str) -> int:
    """Save after 2 steps; go on for as long as it takes, and in every way that changes what is saved."""
    model = Net(LARGE)
    optimizer = sharded(model, **MODES[mode])
    train(model, optimizer, range(2))
    extra = {"step": 2, "list": [1, 2], "tensor": torch.ones(3)}
    handle = checkpoint.save(parent / "c", optimizer, model, extra, asynchronous=True)
    extra["list"].append(3)
    extra["tensor"].zero_()
    extra["step"] = 99
    steps = 2
    finished = torch.zeros(1)
    while not finished:  # until it has ended on all ranks: they make the same number of steps
        train(model, optimizer, range(steps, steps + 1))
        steps += 1
        finished[0] = handle.done()
        dist.all_reduce(finished, dist.ReduceOp.MIN)
    for group in optimizer.param_groups:
        group["lr"] = 77.0
    assert handle.wait() == parent / "c"
    assert handle.done()
    assert handle.wait(timeout=0) == parent / "c"
    if optimizer.rank == 0:
        expected, _ = oracle_at(LARGE, steps)
        optimizer.wait_for_parameters()
        assert_same(dict(model.state_dict()), dict(expected.state_dict()), f"{mode}: training was disturbed")
    else:
        optimizer.wait_for_parameters()
    return steps


@pytest.mark.parametrize("mode", MODES)
def test_the_checkpoint_holds_the_state_of_the_call_although_training_goes_on(mode: str, tmp_path: Path) -> None:
    steps = run_ranks(train_meanwhile, 2, tmp_path, mode)
    assert min(steps) >= 3
    assert_holds(tmp_path / "c", LARGE, 2, mode)
    model = Net(LARGE)
    extra = checkpoint.load(tmp_path / "c", AdamW(model.parameters()), model)
    assert (extra["list"], extra["tensor"].tolist()) == ([1, 2], [1, 1, 1])


def scribble(rank: int, world: int, parent: Path) -> None:
    """Overwrite, right after the call, all memory that was saved."""
    for mode, options in MODES.items():
        model = Net(LARGE)
        optimizer = sharded(model, **options)
        train(model, optimizer, range(1))
        handle = checkpoint.save(parent / mode, optimizer, model, {"step": 1}, asynchronous=True)
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.fill_(13)
            for state in optimizer.optim.state.values():
                for value in state.values():
                    value.fill_(13)
        handle.wait()


def test_memory_that_is_overwritten_right_after_the_call_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    run_ranks(scribble, 2, tmp_path)
    for mode in MODES:
        assert_holds(tmp_path / mode, LARGE, 1, mode)


# --- the handle ---------------------------------------------------------------------------------------------------


def use_handles(rank: int, world: int, parent: Path) -> None:
    model = Net(SMALL)
    optimizer = sharded(model)
    train(model, optimizer, range(1))
    handle = checkpoint.save(parent / "sync", optimizer, model, {"step": 1})
    assert handle.done()
    assert handle.directory == handle.wait() == handle.wait(0) == parent / "sync"
    # Rank 1 comes late: rank 0 sees its save under way, and waits for it for a while.
    if rank == 0:
        handle = checkpoint_started_alone(parent / "late", optimizer, model)
    else:
        time.sleep(0.1)
        handle = checkpoint.save(parent / "late", optimizer, model, {"step": 1}, asynchronous=True)
    assert handle.wait(30) == parent / "late"
    assert handle.done()


def checkpoint_started_alone(path: Path, optimizer: Any, model: nn.Module) -> checkpoint.SaveHandle:
    began = time.monotonic()
    handle = checkpoint.save(path, optimizer, model, {"step": 1}, asynchronous=True)
    assert time.monotonic() - began > 0.05, "it compares its arguments with those of the other ranks first"
    return handle


def stop_and_go_on(rank: int, world: int, parent: Path) -> None:
    """Rank 1 stands still in the middle of the save. Rank 0 waits for a while, and again; then it goes on."""
    model = Net(LARGE)
    optimizer = sharded(model)
    train(model, optimizer, range(1))
    pids: list[Any] = [None] * world
    dist.all_gather_object(pids, os.getpid())
    handle = checkpoint.save(parent / "c", optimizer, model, {"step": 1}, asynchronous=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        try:
            for _ in range(2):
                began = time.monotonic()
                with pytest.raises(TimeoutError):
                    handle.wait(timeout=0.3)
                assert 0.25 < time.monotonic() - began < 20  # (on a busy machine; the save would never end)
                assert not handle.done()
                assert not (parent / "c").exists()
        finally:
            os.kill(pids[1], signal.SIGCONT)
    assert handle.wait(30) == parent / "c"
    assert handle.done()


def test_waiting_has_a_timeout_and_the_save_goes_on(tmp_path: Path) -> None:
    run_ranks(stop_and_go_on, 2, tmp_path)
    assert_holds(tmp_path / "c", LARGE, 1)


def test_handles(tmp_path: Path) -> None:
    run_ranks(use_handles, 2, tmp_path)


# --- one after the other ------------------------------------------------------------------------------------------


def save_in_a_row(rank: int, world: int, parent: Path, mode: str) -> None:
    model = Net(SMALL)
    optimizer = sharded(model, **MODES[mode])
    handles = []
    for number in range(1, 6):
        train(model, optimizer, range(number - 1, number))
        handles.append(
            checkpoint.save(parent / f"step{number}", optimizer, model, {"step": number}, asynchronous=number != 4)
        )
        assert all(handle.done() for handle in handles[:-1]), "the next save waits for the one before"
    train(model, optimizer, range(5, 6))
    handles.append(checkpoint.save(parent / "step3", optimizer, model, {"step": 6}, asynchronous=True, keep=4))
    train(model, optimizer, range(6, 7))
    checkpoint.save(parent / "last", optimizer, model, {"step": 7})
    for handle in handles:
        handle.wait()


@pytest.mark.parametrize("mode", ["element", "gradients, lazy"])
def test_saves_in_a_row_synchronous_or_not(mode: str, tmp_path: Path) -> None:
    run_ranks(save_in_a_row, 2, tmp_path, mode)
    expected = {"step2": 2, "step4": 4, "step5": 5, "step3": 6, "last": 7}
    assert set(os.listdir(tmp_path)) == set(expected)
    for name, steps in expected.items():
        assert_holds(tmp_path / name, SMALL, steps, mode)
    assert checkpoint.latest(tmp_path) == tmp_path / "last"


def load_while_saving(rank: int, world: int, parent: Path) -> None:
    """A load, a consolidation and another optimizer's save do not meet what goes on in the background."""
    model, other = Net(LARGE), Net(SMALL)
    optimizer, others = sharded(model), sharded(other)
    train(model, optimizer, range(1))
    train(other, others, range(1))
    checkpoint.save(parent / "first", optimizer, model, {"step": 1})
    train(model, optimizer, range(1, 2))
    handle = checkpoint.save(parent / "second", optimizer, model, {"step": 2}, asynchronous=True)
    checkpoint.save(parent / "other", others, other, {"step": 1})
    concurrent = checkpoint.save(parent / "other2", others, other, {"step": 1}, asynchronous=True)
    optimizer.consolidate_state_dict(to=0)
    checkpoint.load(parent / "first", optimizer, model)
    train(model, optimizer, range(1, 3))
    handle.wait()
    concurrent.wait()
    checkpoint.save(parent / "third", optimizer, model, {"step": 3})


def test_loads_and_other_saves_while_one_goes_on(tmp_path: Path) -> None:
    run_ranks(load_while_saving, 2, tmp_path, pg_timeout=8)
    for name, steps in (("first", 1), ("second", 2)):
        assert_holds(tmp_path / name, LARGE, steps)
    for name in ("other", "other2"):
        assert_holds(tmp_path / name, SMALL, 1)
    # The buffer that counts batches was loaded too, and the training went on from step 1.
    assert_holds(tmp_path / "third", LARGE, 3)


def save_a_plain_optimizer(tmp_path: Path) -> None:
    model = Net(LARGE)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    handle = checkpoint.save(tmp_path / "plain", optimizer, model, {"step": 2}, asynchronous=True)
    train(model, optimizer, range(2, 5))
    assert handle.wait() == tmp_path / "plain"


def test_a_plain_optimizer_in_one_process(tmp_path: Path) -> None:
    save_a_plain_optimizer(tmp_path)
    assert_holds(tmp_path / "plain", LARGE, 2)


def save_without_state(rank: int, world: int, parent: Path) -> None:
    """Nothing to save on some ranks: an optimizer without state, one parameter, one that never stepped."""
    for name, kind, shapes in (("sgd", SGD, SMALL), ("one", AdamW, [(3,)]), ("fresh", AdamW, SMALL)):
        model = Net(shapes)
        optimizer = sharded(model, kind, shard="tensor")
        if name != "fresh":
            train(model, optimizer, range(1))
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        handle = checkpoint.save(parent / name, optimizer, model, asynchronous=True)
        train(model, optimizer, range(1, 2))
        handle.wait()
        checkpoint.load(parent / name, optimizer, model)
        assert_same(dict(model.state_dict()), weights, name)


def test_optimizers_that_have_nothing_to_save_on_some_ranks(tmp_path: Path) -> None:
    run_ranks(save_without_state, 4, tmp_path)


# --- errors -------------------------------------------------------------------------------------------------------


def fail_in_the_background(rank: int, world: int, parent: Path, culprit: int) -> None:
    model = Net(SMALL)
    optimizer = sharded(model)
    train(model, optimizer, range(1))
    checkpoint.save(parent / "good", optimizer, model, {"step": 1})
    expected: Any = (OSError, RuntimeError)

    # The handle tells it, as often as it is asked, and so does the next save if nobody asked.
    with full_disk(rank == culprit):
        handle = checkpoint.save(parent / "bad", optimizer, model, {"step": 1}, asynchronous=True)
        train(model, optimizer, range(1, 2))
        while not handle.done():
            time.sleep(0.01)
        dist.barrier()
    with pytest.raises(expected, match=r"File too large|rank"):
        checkpoint.save(parent / "bad", optimizer, model, {"step": 2})
    for _ in range(2):
        with pytest.raises(expected, match=r"File too large|rank"):
            handle.wait()
    dist.barrier()
    assert os.listdir(parent) == ["good"]
    dist.barrier()
    checkpoint.save(parent / "bad", optimizer, model, {"step": 2})
    with pytest.raises(expected):
        handle.wait()  # an old handle, asked again, does no harm to what is there
    dist.barrier()
    checkpoint.verify(parent / "bad")
    assert sorted(os.listdir(parent)) == ["bad", "good"]


@pytest.mark.parametrize("culprit", [0, 2])
def test_an_error_in_the_background_is_told_by_the_handle_and_by_the_next_save(culprit: int, tmp_path: Path) -> None:
    run_ranks(fail_in_the_background, 3, tmp_path, culprit)
    assert_holds(tmp_path / "good", SMALL, 1)
    assert_holds(tmp_path / "bad", SMALL, 2)


def fail_then_go_on(rank: int, world: int, parent: Path) -> None:
    """Whoever has heard of the error from the handle can save again."""
    model = Net(SMALL)
    optimizer = sharded(model)
    train(model, optimizer, range(1))
    with full_disk(rank == 1):
        handle = checkpoint.save(parent / "c", optimizer, model, {"step": 1}, asynchronous=True)
        with pytest.raises((OSError, RuntimeError)):
            handle.wait()
        dist.barrier()
    dist.barrier()
    checkpoint.save(parent / "c", optimizer, model, {"step": 1})


def test_a_save_after_an_error_that_was_told_works(tmp_path: Path) -> None:
    run_ranks(fail_then_go_on, 2, tmp_path)
    assert_holds(tmp_path / "c", SMALL, 1)


def fail_and_ask_late(rank: int, world: int, parent: Path) -> None:
    """A failed save's handle is asked while another save to the same place is under way."""
    model = Net(LARGE)
    optimizer = sharded(model)
    train(model, optimizer, range(1))
    with full_disk(rank == 1):
        failed = checkpoint.save(parent / "c", optimizer, model, {"step": 1}, asynchronous=True)
        with pytest.raises((OSError, RuntimeError)):
            checkpoint.save(parent / "c", optimizer, model, {"step": 1})
        dist.barrier()
    handle = checkpoint.save(parent / "c", optimizer, model, {"step": 1}, asynchronous=True)
    asked = 0
    while not handle.done():
        with pytest.raises((OSError, RuntimeError)):
            failed.wait()
        asked += 1
    handle.wait()
    assert asked > 0


def test_a_failed_handle_does_no_harm_to_a_later_save(tmp_path: Path) -> None:
    run_ranks(fail_and_ask_late, 2, tmp_path)
    assert_holds(tmp_path / "c", LARGE, 1)


def ask_on_one_rank_only(rank: int, world: int, parent: Path) -> None:
    """Rank 0 asks its handle, the others do not (they log nothing): the next save is alike on all."""
    model = Net(SMALL)
    optimizer = sharded(model)
    train(model, optimizer, range(1))
    with full_disk(rank == 1):
        handle = checkpoint.save(parent / "c", optimizer, model, {"step": 1}, asynchronous=True)
        while not handle.done():
            time.sleep(0.01)
        dist.barrier()
    if rank == 0:
        with pytest.raises(RuntimeError):
            handle.wait()
    outcomes: list[Any] = [None] * world
    for _ in range(2):
        try:
            checkpoint.save(parent / "c", optimizer, model, {"step": 1})
            told = "saved"
        except Exception:
            told = "failed"
        dist.all_gather_object(outcomes, told)
        assert len(set(outcomes)) == 1, f"the ranks disagree: {outcomes}"
    assert told == "saved"


def test_a_handle_that_is_asked_on_one_rank_only(tmp_path: Path) -> None:
    run_ranks(ask_on_one_rank_only, 2, tmp_path, pg_timeout=10)
    assert_holds(tmp_path / "c", SMALL, 1)


def refuse_at_once(rank: int, world: int, parent: Path) -> None:
    """What is wrong with the arguments is told by the call, not later."""
    model = Net(SMALL)
    optimizer = sharded(model)
    for wrong in ({"keep": 0}, {"extra": [1]}):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=next(iter(wrong))):
            checkpoint.save(parent / "c", optimizer, model, asynchronous=True, **wrong)
    assert os.listdir(parent) == []
    train(model, optimizer, range(1))
    checkpoint.save(parent / "c", optimizer, model, {"step": 1}, asynchronous=True).wait()


def test_wrong_arguments_are_told_by_the_call(tmp_path: Path) -> None:
    run_ranks(refuse_at_once, 2, tmp_path)
    assert_holds(tmp_path / "c", SMALL, 1)


# --- the end of the program ---------------------------------------------------------------------------------------


def leave(rank: int, world: int, parent: Path) -> None:
    """The last line of the program is a save; nobody waits. (The harness then leaves the group, as programs do.)"""
    model = Net(LARGE)
    optimizer = sharded(model)
    train(model, optimizer, range(1))
    checkpoint.save(parent / "first", optimizer, model, {"step": 1})
    train(model, optimizer, range(1, 2))
    checkpoint.save(parent / "c", optimizer, model, {"step": 2}, asynchronous=True)


@pytest.mark.extended
def test_a_program_that_ends_right_after_the_call(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """The checkpoint is complete, or its loss is told; no hang, no crash."""
    for trial in range(2):
        parent = tmp_path / str(trial)
        parent.mkdir()
        run_ranks(leave, 2, parent, timeout=30, pg_timeout=5, fresh=True)
        told = capfd.readouterr().err
        if (parent / "c").exists():
            assert_holds(parent / "c", LARGE, 2)
        else:
            assert str(parent / "c") in told, f"{sorted(os.listdir(parent))}, and not a word: {told}"
        assert_holds(parent / "first", LARGE, 1)
        assert checkpoint.latest(parent) == parent / ("c" if (parent / "c").exists() else "first")


def leave_and_wait(rank: int, world: int, parent: Path) -> str:
    """Whoever leaves the group and then asks is told the truth."""
    model = Net(LARGE)
    optimizer = sharded(model)
    train(model, optimizer, range(1))
    handle = checkpoint.save(parent / "c", optimizer, model, {"step": 1}, asynchronous=True)
    dist.destroy_process_group()
    try:
        handle.wait(30)
    except TimeoutError:
        return "hangs"
    except Exception:
        return "failed"
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the harness leaves it
    return "saved"


def test_a_group_that_is_left_while_the_save_goes_on(tmp_path: Path) -> None:
    told = run_ranks(leave_and_wait, 2, tmp_path, pg_timeout=5, fresh=True)
    if (tmp_path / "c").exists():
        assert told == ["saved", "saved"]
        assert_holds(tmp_path / "c", LARGE, 1)
    else:
        assert told == ["failed", "failed"]

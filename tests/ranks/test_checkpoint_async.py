"""Saves in the background: the checkpoint holds the state of the call, errors are told, and nothing hangs.

That training goes on meanwhile as if nothing was saved is a claim of ``tests/differential``. Oracle: the plain
optimizer on the same gradients, stopped at the step of the call. Bit-equal.
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

from shardstep import checkpoint
from tests.checkpoints import LARGE, Weights, assert_holds, sharded, step
from tests.harness import run_ranks
from tests.surroundings import full_disk

MODES: dict[str, dict[str, Any]] = {
    "element": {},
    "tensor": {"shard": "tensor"},
    "bucket views": {"parameters_as_bucket_view": True},
    "lazy": {"lazy_gather": True},
    "gradients": {"shard_gradients": True},
}


def scribble(rank: int, world: int, parent: Path) -> None:
    """Overwrite, right after the call, all memory that was saved."""
    for mode, options in MODES.items():
        model, optimizer = sharded(1, Weights(LARGE), **options)
        extra = {"step": 1, "list": [1, 2], "tensor": torch.ones(3)}
        handle = checkpoint.save(parent / mode, optimizer, model, extra, asynchronous=True)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(13)
            for state in optimizer.optim.state.values():
                for value in state.values():
                    value.fill_(13)
        extra["list"].append(3)
        extra["tensor"].zero_()
        extra["step"] = optimizer.param_groups[0]["lr"] = 99
        handle.wait()


def test_memory_that_is_overwritten_right_after_the_call_is_not_in_the_checkpoint(tmp_path):
    run_ranks(scribble, 2, tmp_path)
    for mode in MODES:
        assert_holds(tmp_path / mode, 1, LARGE)
        extra = checkpoint.load_extra(tmp_path / mode)
        assert (extra["list"], extra["tensor"].tolist()) == ([1, 2], [1, 1, 1])


def stop_and_go_on(rank: int, world: int, parent: Path) -> None:
    """Rank 1 stands still in the middle of the save. Rank 0 waits for a while, and again; then it goes on."""
    model, optimizer = sharded(1, Weights(LARGE))
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
    assert handle.wait(30) == handle.wait(0) == handle.directory == parent / "c"
    assert handle.done()


def test_waiting_has_a_timeout_and_the_save_goes_on(tmp_path):
    run_ranks(stop_and_go_on, 2, tmp_path)
    assert_holds(tmp_path / "c", 1, LARGE)


def load_while_saving(rank: int, world: int, parent: Path) -> None:
    """A load, a consolidation and another optimizer's save do not meet what goes on in the background."""
    (model, optimizer), (other, others) = sharded(1, Weights(LARGE)), sharded(1)
    checkpoint.save(parent / "first", optimizer, model, {"step": 1})
    step(model, optimizer, range(1, 2))
    handle = checkpoint.save(parent / "second", optimizer, model, {"step": 2}, asynchronous=True)
    concurrent = checkpoint.save(parent / "other", others, other, {"step": 1}, asynchronous=True)
    optimizer.consolidate_state_dict(to=0)
    checkpoint.load(parent / "first", optimizer, model)
    step(model, optimizer, range(1, 3))
    concurrent.wait()
    handle.wait()
    checkpoint.save(parent / "third", optimizer, model, {"step": 3})


def test_loads_and_other_saves_while_one_goes_on(tmp_path):
    run_ranks(load_while_saving, 2, tmp_path, pg_timeout=8)
    for name, steps in (("first", 1), ("second", 2), ("third", 3)):
        assert_holds(tmp_path / name, steps, LARGE)
    assert_holds(tmp_path / "other", 1)


def fail_in_the_background(rank: int, world: int, parent: Path, asked: int | None) -> None:
    """The handle tells the error as often as it is asked. The next save tells it if no rank has asked."""
    model, optimizer = sharded(1)
    with full_disk(rank == 1):
        handle = checkpoint.save(parent / "c", optimizer, model, {"step": 1}, asynchronous=True)
        while not handle.done():
            time.sleep(0.01)
        dist.barrier()
    if rank == asked:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="rank 1"):
                handle.wait()
    if asked is None:
        with pytest.raises((OSError, RuntimeError), match=r"File too large|rank 1"):
            checkpoint.save(parent / "c", optimizer, model, {"step": 1})
    dist.barrier()
    assert os.listdir(parent) == []
    dist.barrier()
    again = checkpoint.save(parent / "c", optimizer, model, {"step": 1}, asynchronous=True)
    with pytest.raises((OSError, RuntimeError)):
        handle.wait()  # an old handle, asked again, does no harm to what is being saved
    again.wait()


@pytest.mark.parametrize("asked", [None, 0])
def test_an_error_in_the_background_is_told_by_the_handle_or_by_the_next_save_on_all_ranks(asked, tmp_path):
    run_ranks(fail_in_the_background, 3, tmp_path, asked, pg_timeout=10)
    assert_holds(tmp_path / "c", 1)


# --- the end of the program -------------------------------------------------------------------------------------------


def leave(rank: int, world: int, parent: Path) -> str:
    """The last line of the program is a save; nobody waits, and the group is destroyed as programs do."""
    model, optimizer = sharded(1, Weights(LARGE))
    checkpoint.save(parent / "first", optimizer, model, {"step": 1})
    step(model, optimizer, range(1, 2))
    handle = checkpoint.save(parent / "c", optimizer, model, {"step": 2}, asynchronous=True)
    dist.destroy_process_group()
    try:
        return str(handle.wait(20))
    except RuntimeError as error:
        return str(error)
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which the harness leaves


def test_a_program_that_ends_right_after_the_call_has_saved_or_says_what_is_lost(tmp_path):
    told = run_ranks(leave, 2, tmp_path, timeout=30, pg_timeout=5, fresh=True)
    if (tmp_path / "c").exists():
        assert_holds(tmp_path / "c", 2, LARGE)
    else:
        assert all("checkpoint.save" in text for text in told), told
    assert_holds(tmp_path / "first", 1, LARGE)

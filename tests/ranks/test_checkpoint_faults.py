"""Checkpoints survive faults: processes killed with -9, files damaged on disk, errors on one rank, two jobs at once.

Oracle: the plain optimizer on the same gradients. All ranks have the same gradients, so everything is bit-equal.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from shardstep import checkpoint
from shardstep.checkpoint import CheckpointError
from tests.checkpoints import LARGE, Weights, assert_holds, die_before, everything_in, let_pass, plain, sharded, step
from tests.harness import run_ranks
from tests.oracle import assert_same
from tests.surroundings import full_disk

RANKS = 3

# --- kill -9 in the middle of a save ----------------------------------------------------------------------------------


def save_and_be_killed(rank: int, world: int, parent: Path, victim: int, touch: float, outcome: Path) -> int:
    """Resume, make a step, replace the checkpoint; meanwhile the victim is killed. Returns its touches of the disk."""
    model, optimizer = sharded(0)
    found = checkpoint.resume(parent, optimizer, model)
    steps = found[1]["step"] if found else 0
    step(model, optimizer, range(steps, steps + 1))
    dist.barrier()
    touches = die_before(touch if rank == victim else float("inf"), parent)
    began = time.monotonic()
    try:
        checkpoint.save(parent / "last", optimizer, model, {"step": steps + 1}, keep=2)
        told = "saved"
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    (outcome / f"{rank}.json").write_text(json.dumps([told, time.monotonic() - began]))
    return touches[0]


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_in_a_save_leaves_a_complete_checkpoint_and_the_others_raise_in_time(victim, tmp_path):
    parent, outcome = tmp_path / "checkpoints", tmp_path / "outcomes"
    outcome.mkdir()
    for _ in range(2):  # the second one replaces the first, as all others do
        touches = run_ranks(save_and_be_killed, RANKS, parent, victim, float("inf"), outcome, fresh=True)[victim]
    steps = assert_holds(parent / "last", 2)
    for touch in sorted({int(part * touches) for part in (0.1, 0.4, 0.6, 0.8, 0.99)}):
        with pytest.raises(AssertionError, match=f"rank {victim} of {RANKS} failed first:\ndied with exit code -9"):
            run_ranks(save_and_be_killed, RANKS, parent, victim, touch, outcome, timeout=60, fresh=True)
        saved = False
        for rank in set(range(RANKS)) - {victim}:
            told, took = json.loads((outcome / f"{rank}.json").read_text())
            saved = saved or told == "saved"
            # Without looking it would be the group's time-out, a minute here, for those that wait for a third rank.
            assert took < 8, f"killed at {touch} of {touches}: rank {rank} was busy for {took:.1f} s"
        newest = checkpoint.latest(parent)
        assert newest is not None, f"killed at {touch} of {touches}: no checkpoint is left in {os.listdir(parent)}"
        steps = assert_holds(newest, [steps + 1] if saved else [steps, steps + 1])
    let_pass(25 * 3600, parent)
    run_ranks(save_and_be_killed, RANKS, parent, victim, float("inf"), outcome, fresh=True)
    assert os.listdir(parent) == ["last"], "what the killed ones left is deleted when it is a day old"


# --- damaged files ----------------------------------------------------------------------------------------------------


def save_two(rank: int, world: int, parent: Path) -> None:
    """Checkpoints of step 1 and 2, and one of step 2 that DCP itself has written."""
    model, optimizer = sharded(0)
    for number, name in ((1, "old"), (2, "new")):
        step(model, optimizer, range(number - 1, number))
        checkpoint.save(parent / name, optimizer, model, {"step": number, "note": "x" * 50})
    tree = {"optim": optimizer.sharded_state_dict(model), "model": model.state_dict(), "extra": {"step": 2}}
    dcp.save(tree, checkpoint_id=parent / "dcp")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("two")
    run_ranks(save_two, RANKS, parent)
    return parent


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def turned_into_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


# The first four are noticed in a directory of DCP, too, which has no checksums.
DAMAGE: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: os.truncate(path, 0),
    "missing": Path.unlink,
    "a directory": turned_into_a_directory,
    "noise": lambda path: path.write_bytes(random.Random(1).randbytes(path.stat().st_size)),
    "a byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "a byte long": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "a bit flipped": flipped,
    "of the old one": lambda path: shutil.copyfile(path.parent.parent / "old" / path.name, path),
}


def load_damaged(rank: int, world: int, two: Path, name: str, work: Path) -> None:
    """Every case on the same, trained optimizer."""
    model, optimizer = sharded(5)
    before = everything_in(model, optimizer)
    for file in ("__1_0.distcp", ".metadata", *(["shardstep.json"] if name == "new" else [])):
        for kind, damage in list(DAMAGE.items())[: 4 if name == "dcp" else None]:
            if (file, kind) == ("shardstep.json", "missing"):
                continue  # then it is a directory of DCP, which loads
            path = work / file / kind / name
            if rank == 0:
                shutil.copytree(two / "old", path.parent / "old")
                shutil.copytree(two / name, path)
                damage(path / file)
            dist.barrier()
            # What contradicts the list of checksums is in the list or in the file.
            named = re.escape(str(path) if file == "shardstep.json" else file)
            with pytest.raises(CheckpointError, match=named):
                checkpoint.load(path, optimizer, model)
            assert_same(everything_in(model, optimizer), before, f"{file}, {kind}: the optimizer has changed")
            if name == "new":
                assert checkpoint.latest(path.parent) == path.parent / "old"
                fresh, optimizer_of_fresh = sharded(0)
                with pytest.warns(UserWarning, match=f"skipped because it cannot be read: .*{re.escape(str(path))}"):
                    found = checkpoint.resume(path.parent, optimizer_of_fresh, fresh)
                assert found is not None
                assert (found[0], found[1]["step"]) == (path.parent / "old", 1)
    if name == "dcp":
        assert checkpoint.load(two / name, optimizer, model) == {"step": 2}


@pytest.mark.parametrize("name", ["new", "dcp"])
def test_a_damaged_file_is_named_on_every_rank_nothing_changes_and_resume_takes_the_one_before(name, two, tmp_path):
    run_ranks(load_damaged, RANKS, two, name, tmp_path)


def load_where_one_rank_sees_another_directory(rank: int, world: int, two: Path, work: Path) -> None:
    """As on hosts with file systems of their own: on rank 1 the checkpoint is missing, damaged, or another one."""
    model, optimizer = sharded(5)
    before = everything_in(model, optimizer)
    mine = work / str(rank)
    for kind in ("missing", "damaged", "old"):
        shutil.rmtree(mine, ignore_errors=True)
        if rank != 1 or kind != "missing":
            shutil.copytree(two / ("old" if rank == 1 and kind == "old" else "new"), mine / "new")
        if rank == 1 and kind == "damaged":
            DAMAGE["a byte short"](mine / "new" / "__0_0.distcp")
        error = CheckpointError if kind != "old" else RuntimeError
        with pytest.raises(error, match="new" if kind != "old" else "metadata"):
            checkpoint.load(mine / "new", optimizer, model)
        assert_same(everything_in(model, optimizer), before, kind)


def test_a_checkpoint_that_only_one_rank_cannot_read_is_loaded_by_none(two, tmp_path):
    run_ranks(load_where_one_rank_sees_another_directory, RANKS, two, tmp_path)


# --- an error on one rank ---------------------------------------------------------------------------------------------


def error_of_save(path: Path, optimizer: Any, model: nn.Module, **options: Any) -> str:
    try:
        checkpoint.save(path, optimizer, model, {"step": 2}, **options).wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def listing(parent: Path) -> list[str]:
    dist.barrier()
    found = sorted(os.listdir(parent))
    dist.barrier()
    return found


def fail_to_save(rank: int, world: int, parent: Path, asynchronous: bool) -> None:
    model, optimizer = sharded(1)
    checkpoint.save(parent / "first", optimizer, model, {"step": 1})
    step(model, optimizer, range(1, 2))
    for culprit in range(world):
        for name in ("first", "second"):  # what is there stays; what is not there does not come
            with full_disk(rank == culprit):
                told = error_of_save(parent / name, optimizer, model, asynchronous=asynchronous)
            expected = "OSError" if rank == culprit else f"rank {culprit}"
            assert expected in told, f"full disk on {culprit}, {name}: {told}"
            assert listing(parent) == ["first"], f"full disk on {culprit}, {name}"
    checkpoint.save(parent / "second", optimizer, model, {"step": 2}, asynchronous=asynchronous).wait()
    assert listing(parent) == ["first", "second"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_on_one_rank_undoes_the_save_on_all(asynchronous, tmp_path):
    run_ranks(fail_to_save, RANKS, tmp_path, asynchronous)
    for steps, name in enumerate(("first", "second"), start=1):
        assert_holds(tmp_path / name, steps)


def save_where_it_cannot_be(rank: int, world: int, parent: Path) -> None:
    model, optimizer = sharded(0)
    (parent / "a file").touch()
    for name in ("mine", "empty"):
        (parent / name).mkdir(exist_ok=True)
    (parent / "mine" / "thesis.txt").touch()
    for path in (parent / "a file", parent / "a file" / "below", parent / "mine"):
        dist.barrier()
        told = error_of_save(path, optimizer, model)
        assert ("rank 0" in told) or (rank == 0 and path.name in told), f"{path}: {told}"
    assert listing(parent) == ["a file", "empty", "mine"]
    assert (parent / "mine" / "thesis.txt").exists()
    for path in (parent / "empty", parent / "new" / "below" / "it"):
        checkpoint.save(path, optimizer, model)
        checkpoint.verify(path)


def test_a_save_never_deletes_what_is_no_checkpoint(tmp_path):
    run_ranks(save_where_it_cannot_be, 2, tmp_path)


# --- two jobs ---------------------------------------------------------------------------------------------------------


def meet(store: dist.Store, where: str, world: int) -> None:
    store.add(where, 1)
    while store.add(where, 0) < world:
        time.sleep(0.01)


def save_beside_another_job(rank: int, world: int, path: Path) -> None:
    """Each rank is a job of its own, as if one was started again while the old one still runs."""
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    for number in range(3):
        model, optimizer = plain(1 + rank, Weights(LARGE))
        meet(store, f"round {number}", world)
        checkpoint.save(path, optimizer, model, {"step": 1 + rank})
        meet(store, f"done {number}", world)
        if rank == 0:
            assert_holds(path, [1, 2], LARGE)
        meet(store, f"checked {number}", world)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which the harness leaves


def test_two_jobs_that_save_under_one_name_both_succeed_and_one_whole_checkpoint_stays(tmp_path):
    run_ranks(save_beside_another_job, 2, tmp_path / "c", fresh=True)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]

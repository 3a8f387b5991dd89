"""Checkpoints survive faults: processes killed with -9, files damaged on disk, errors on one rank.

Oracle: the plain optimizer on the same gradients. All ranks have the same gradients, so everything is bit-equal.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from shardstep import ZeroRedundancyOptimizer, checkpoint
from shardstep.checkpoint import CheckpointError
from shardstep.checkpoint.storage import manifest as manifests
from tests.harness import run_ranks
from tests.oracle import assert_same
from tests.surroundings import full_disk
from tests.twins import values

RANKS = 3
LR = 1e-2


class Weights(nn.Module):
    """Nothing but parameters."""

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        for position, shape in enumerate(shapes):
            self.register_parameter(f"w{position}", nn.Parameter(values(shape, 100 + position)))


def sharded(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, **options)


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Step with the gradients of step ``number``: cheap, and others for every step and parameter."""
    for position, param in enumerate(model.parameters()):
        param.grad = (param.detach() + number * 0.7 + position).sin()
    optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for param in model.parameters():
        yield param.detach()
        yield from (value for _, value in sorted(optimizer.state[param].items()))


def digest(tensors: Iterator[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def weights_digest(model: nn.Module) -> str:
    return digest(param.detach() for param in model.parameters())


# --- kill -9 in the middle of a save ------------------------------------------------------------------------------

LARGE = [(700, 1000), (900, 1000), (1000, 1100), (50,)]  # 22 MB of weights, 65 MB in a checkpoint: some 100 ms
TRIALS = 20
BATCHES = 4  # of trials, each with its own directory
PG_TIMEOUT = 2.0


class Oracle:
    """What weights, and everything, are after each number of steps."""

    def __init__(self, steps: int) -> None:
        model = Weights(LARGE)
        optimizer = plain(model)
        self.weights, self.everything = [weights_digest(model)], [""]
        for number in range(1, steps + 1):
            step(model, optimizer, number)
            self.weights.append(weights_digest(model))
            self.everything.append(digest(state_of(model, optimizer)))


def time_a_save(rank: int, world: int, parent: Path) -> float:
    """Step 1 is saved, twice; the second time is what a save takes."""
    model = Weights(LARGE)
    optimizer = sharded(model)
    step(model, optimizer, 1)
    for name in ("last", "again"):
        dist.barrier()
        began = time.monotonic()
        checkpoint.save(parent / name, optimizer, model, {"step": 1})
    return time.monotonic() - began


@contextmanager
def killed_after(delay: float | None) -> Iterator[None]:
    """Another process kills this one with -9, ``delay`` seconds from now; nothing survives the block."""
    if delay is None:
        yield
        return
    me = os.getpid()
    if os.fork() == 0:
        time.sleep(delay)
        os.kill(me, signal.SIGKILL)
        os._exit(0)
    yield
    time.sleep(60)


def saved_and_killed(
    rank: int, world: int, parent: Path, name: str, victim: int, delay: float, expected: list[str], outcome: Path
) -> None:
    """Resume from the newest checkpoint, make a step, save; meanwhile the victim is killed."""
    model = Weights(LARGE)
    # The optimizer's group has a short timeout. Barriers of the other one let no rank fall behind on a busy machine.
    hasty = dist.new_group(timeout=timedelta(seconds=PG_TIMEOUT))
    dist.barrier()
    optimizer = sharded(model, process_group=hasty)
    dist.barrier()
    found = checkpoint.resume(parent, optimizer, model)
    assert found is not None
    number = found[1]["step"]
    assert weights_digest(model) == expected[number], f"{found[0]} holds other weights than those of step {number}"
    step(model, optimizer, number + 1)
    assert weights_digest(model) == expected[number + 1], f"{found[0]} goes on in another way after step {number}"
    dist.barrier()
    with killed_after(delay if rank == victim else None):
        began = time.monotonic()
        try:
            checkpoint.save(parent / (name or f"step{number + 1}"), optimizer, model, {"step": number + 1}, keep=3)
            told = "saved"
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        took = time.monotonic() - began
    (outcome / f"{rank}.json").write_text(json.dumps([told, took]))


def check_newest(parent: Path, allowed: Sequence[int], oracle: Oracle, claim: str) -> int:
    """``latest`` is a checkpoint of an allowed step, undamaged, and everything in it is right."""
    path = checkpoint.latest(parent)
    assert path is not None, f"{claim}: no checkpoint is left in {os.listdir(parent)}"
    checkpoint.verify(path)
    model = Weights(LARGE)
    optimizer = plain(model)
    number = checkpoint.load(path, optimizer, model)["step"]
    assert number in allowed, f"{claim}: the newest checkpoint is of step {number}"
    assert digest(state_of(model, optimizer)) == oracle.everything[number], f"{claim}: {path} is a mixture"
    return number


@pytest.mark.programs
@pytest.mark.long
@pytest.mark.parametrize("batch", [0, *(pytest.param(n, marks=pytest.mark.again) for n in range(1, BATCHES))])
def test_a_rank_that_is_killed_in_the_middle_of_a_save_leaves_a_complete_checkpoint(batch: int, tmp_path: Path) -> None:
    chance = random.Random(1000 + batch)
    trials = TRIALS // BATCHES
    oracle = Oracle(trials + 1)
    duration = max(run_ranks(time_a_save, RANKS, tmp_path))
    victims = [trial % RANKS for trial in range(trials)]
    chance.shuffle(victims)
    at, in_the_middle = 1, 0
    for trial, victim in enumerate(victims):
        # One moment in each part of the time that a save takes, and a little beyond.
        delay = (trial + chance.random()) / trials * 1.1 * duration
        name = chance.choice(["last", ""])  # replaces a checkpoint, or is a new one
        claim = f"trial {trial}: rank {victim} killed {delay:.3f} s into the save of {name or 'a new one'}"
        outcome = tmp_path / "outcomes" / str(trial)
        outcome.mkdir(parents=True)
        arguments = (tmp_path / "", name, victim, delay, oracle.weights, outcome)
        with pytest.raises(AssertionError, match=f"rank {victim} of {RANKS} failed first:\ndied with exit code -9"):
            run_ranks(saved_and_killed, RANKS, *arguments, timeout=60, fresh=True)
        told = {}
        for rank in set(range(RANKS)) - {victim}:
            told[rank], took = json.loads((outcome / f"{rank}.json").read_text())
            # A meeting may wait for the timeout (and 5 s more for a rank that dies while it counts the votes), the
            # messages that follow it once more. Without a timeout it would be minutes.
            assert took < 2 * PG_TIMEOUT + 5 + 5 * duration + 2, f"{claim}: rank {rank} was busy for {took:.1f} s"
        saved = [rank for rank in told if told[rank] == "saved"]
        in_the_middle += not saved
        at = check_newest(tmp_path, [at + 1] if saved else [at, at + 1], oracle, f"{claim}: {told}")
    assert in_the_middle >= trials // 3, f"only {in_the_middle} of {trials} were killed in the middle"


# --- damaged files ------------------------------------------------------------------------------------------------

# Pieces of the first two are larger than what is written as one (16 KiB), also on three ranks; rows are cut.
SMALL = [(96, 130), (41, 200), (7, 5), (3,), ()]


def save_two(rank: int, world: int, parent: Path) -> None:
    """Checkpoints of step 1 and 2, and one of step 2 that DCP itself has written."""
    model = Weights(SMALL)
    optimizer = sharded(model)
    for number, name in ((1, "old"), (2, "new")):
        step(model, optimizer, number)
        checkpoint.save(parent / name, optimizer, model, {"step": number, "note": "x" * 50})
    tree = {"optim": optimizer.sharded_state_dict(model), "model": model.state_dict(), "extra": {"step": 2}}
    dcp.save(tree, checkpoint_id=parent / "dcp")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("two")
    run_ranks(save_two, RANKS, parent)
    return parent


def flipped(position: float, bit: int = 0) -> Callable[[Path], None]:
    """Flip a bit: at a byte, counted from the end if negative, or at a part of the file."""

    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(position * len(data)) if isinstance(position, float) else position] ^= 1 << bit
        path.write_bytes(data)

    return damage


def truncated(by: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        size = path.stat().st_size
        os.truncate(path, int(size * by) if isinstance(by, float) else size - by)

    return damage


def filled_with(data: bytes) -> Callable[[Path], None]:
    """Something else of the same size."""

    def damage(path: Path) -> None:
        size = path.stat().st_size
        path.write_bytes((data * (size // len(data) + 1))[:size])

    return damage


def prolonged(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def turned_into_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def taken_from_the_old_one(path: Path) -> None:
    shutil.copyfile(path.parent.parent / "old" / path.name, path)


def taken_from_another_rank(path: Path) -> None:
    shutil.copyfile(path.with_name("__2_0.distcp" if path.name != "__2_0.distcp" else "__1_0.distcp"), path)


ANY_FILE: dict[str, Callable[[Path], None]] = {
    "empty": truncated(1.0 - 1.0),
    "half": truncated(0.5),
    "a byte short": truncated(1),
    "a byte long": prolonged,
    "missing": Path.unlink,
    "a directory": turned_into_a_directory,
    "noise": filled_with(random.Random(1).randbytes(4096)),
    "zeros": filled_with(b"\0"),
    "text": filled_with(b"this is no checkpoint\n"),
    "first bit flipped": flipped(0),
    "last bit flipped": flipped(-1, 7),
}
Case = tuple[str, str, Callable[[Path], None]]


def places_in(path: Path, file: manifests.FileList) -> Iterator[tuple[str, int]]:
    """A byte in every kind of place of a data file."""
    framed = [item for item in file.items.values() if item.head]
    small = [item for item in file.items.values() if not item.head]
    assert framed, f"{path} has no large item"
    for item in framed:
        end = item.offset + item.head + item.payload
        yield "head", item.offset + item.head // 2
        yield "first of payload", item.offset + item.head
        yield "middle of payload", item.offset + item.head + item.payload // 2
        yield "last of payload", end - 1
        yield "tail", (end + item.offset + item.length) // 2
    for item in small[:4]:
        yield "small item", item.offset + item.length // 2


def cases_for(new: Path) -> list[Case]:
    manifest = manifests.read(new)
    assert manifest is not None
    names = [*manifest.files, manifests.METADATA_NAME, manifests.FILE_NAME]
    cases = [(f"{name}: {what}", name, damage) for name in names[1:] for what, damage in ANY_FILE.items()]
    for name, file in manifest.files.items():
        chance = random.Random(name)
        at = [*places_in(new / name, file), *(("anywhere", chance.randrange(file.size)) for _ in range(3))]
        cases += [(f"{name}: {what} ({byte})", name, flipped(byte, chance.randrange(8))) for what, byte in at]
        cases.append((f"{name}: of the old checkpoint", name, taken_from_the_old_one))
        cases.append((f"{name}: of another rank", name, taken_from_another_rank))
    for part in (0.1, 0.3, 0.5, 0.7, 0.9):
        cases.append((f".metadata: flipped at {part}", manifests.METADATA_NAME, flipped(part, 2)))
    cases.append((".metadata: of the old checkpoint", manifests.METADATA_NAME, taken_from_the_old_one))
    cases.append(("shardstep.json: of the old checkpoint", manifests.FILE_NAME, taken_from_the_old_one))
    # Without the list of checksums it is a plain directory of DCP, which loads.
    return [case for case in cases if case[0] != f"{manifests.FILE_NAME}: missing"]


def everything_in(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> Any:
    """All that a load changes, copied."""
    local = optimizer.optim
    states = [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in local.state[param].items()}
        for group in local.param_groups
        for param in group["params"]
    ]
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return [param.detach().clone() for param in model.parameters()], states, options


def load_damaged(rank: int, world: int, two: Path, work: Path) -> list[str]:
    """Every case on the same, trained optimizer. Returns what is wrong."""
    model = Weights(SMALL)
    optimizer = sharded(model)
    step(model, optimizer, 77)
    optimizer.param_groups[0]["lr"] = 0.123
    before = everything_in(model, optimizer)
    wrong = []
    for position, (claim, name, damage) in enumerate(cases_for(two / "new")):
        parent = work / str(position)
        if rank == 0:
            shutil.copytree(two / "new", parent / "new")
            (parent / "old").symlink_to(two / "old")
            damage(parent / "new" / name)
        dist.barrier()
        wrong += [f"{claim}: {text}" for text in problems_of_a_load(parent / "new", name, model, optimizer, before)]
        dist.barrier()
    return wrong


def problems_of_a_load(
    path: Path, name: str, model: nn.Module, optimizer: ZeroRedundancyOptimizer, before: Any
) -> Iterator[str]:
    try:
        checkpoint.load(path, optimizer, model)
        yield "loads"
    except CheckpointError as error:
        # What contradicts the list of checksums is in the list or in the file.
        named = [name, *([manifests.METADATA_NAME, ".distcp"] if name == manifests.FILE_NAME else [])]
        if not any(part in str(error) for part in named):
            yield f"the error does not name the file: {error}"
    except Exception as error:
        yield f"{type(error).__name__}: {error}"
    try:
        assert_same(everything_in(model, optimizer), before)
    except AssertionError as error:
        yield f"the optimizer has changed: {str(error)[:200]}"


@pytest.mark.extended
def test_a_damaged_file_is_named_on_every_rank_and_nothing_changes(two: Path, tmp_path: Path) -> None:
    found = run_ranks(load_damaged, RANKS, two, tmp_path)
    assert not any(found), "\n".join(f"rank {rank}: {text}" for rank in range(RANKS) for text in found[rank])


def resume_damaged(rank: int, world: int, two: Path, work: Path) -> list[str]:
    """Fresh optimizers; the new checkpoint is damaged in some way, the old one is taken, with a warning."""
    oracle = Weights(SMALL)
    oracle_optimizer = plain(oracle)
    step(oracle, oracle_optimizer, 1)
    wrong = []
    for position, (claim, name, damage) in enumerate(cases_for(two / "new")):
        if position % 4:
            continue
        parent = work / str(position)
        if rank == 0:
            for kind in ("old", "new"):
                shutil.copytree(two / kind, parent / kind)
            damage(parent / "new" / name)
        dist.barrier()
        wrong += [f"{claim}: {text}" for text in problems_of_resuming(parent, oracle)]
        dist.barrier()
    return wrong


def problems_of_resuming(parent: Path, oracle: nn.Module) -> Iterator[str]:
    model = Weights(SMALL)
    optimizer = sharded(model)
    if checkpoint.latest(parent) != parent / "old":
        yield f"latest() is {checkpoint.latest(parent)}"
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = checkpoint.resume(parent, optimizer, model)
    except Exception as error:
        yield f"resume: {type(error).__name__}: {error}"
        return
    if found is None or found[0] != parent / "old" or found[1]["step"] != 1:
        yield f"resume() returned {found}"
    if weights_digest(model) != weights_digest(oracle):
        yield "the weights are not those of the old checkpoint"
    texts = [str(warning.message) for warning in told]
    if not any(str(parent / "new") in text for text in texts):
        yield f"no warning names the checkpoint that is skipped: {texts}"


@pytest.mark.extended
def test_resume_falls_back_to_the_checkpoint_before_a_damaged_one(two: Path, tmp_path: Path) -> None:
    found = run_ranks(resume_damaged, RANKS, two, tmp_path)
    assert not any(found), "\n".join(f"rank {rank}: {text}" for rank in range(RANKS) for text in found[rank])


def load_damaged_dcp(rank: int, world: int, two: Path, work: Path) -> list[str]:
    """A directory that DCP has written has no checksums, but what is no checkpoint is refused all the same."""
    model = Weights(SMALL)
    optimizer = sharded(model)
    step(model, optimizer, 77)
    before = everything_in(model, optimizer)
    wrong = []
    files = sorted(path.name for path in (two / "dcp").iterdir())
    kinds = ("empty", "half", "missing", "a directory", "noise", "zeros", "text")
    for name in files:
        for kind in kinds:
            path = work / name / kind / "dcp"
            if rank == 0:
                shutil.copytree(two / "dcp", path)
                ANY_FILE[kind](path / name)
            dist.barrier()
            told = problems_of_a_load(path, name, model, optimizer, before)
            wrong += [f"{name}, {kind}: {text}" for text in told]
            dist.barrier()
    assert checkpoint.load(two / "dcp", optimizer, model) == {"step": 2}
    return wrong


def test_a_foreign_file_in_a_directory_of_dcp_is_named_on_every_rank(two: Path, tmp_path: Path) -> None:
    found = run_ranks(load_damaged_dcp, RANKS, two, tmp_path)
    assert not any(found), "\n".join(f"rank {rank}: {text}" for rank in range(RANKS) for text in found[rank])


def load_where_one_rank_sees_another_directory(rank: int, world: int, two: Path, work: Path) -> None:
    """As on hosts with file systems of their own: on rank 1 the checkpoint is missing, damaged, or another one."""
    model = Weights(SMALL)
    optimizer = sharded(model)
    step(model, optimizer, 77)
    before = everything_in(model, optimizer)
    mine = work / str(rank)
    for kind in ("missing", "damaged", "old"):
        shutil.rmtree(mine, ignore_errors=True)
        if rank != 1 or kind != "missing":
            shutil.copytree(two / ("old" if rank == 1 and kind == "old" else "new"), mine / "new")
        if rank == 1 and kind == "damaged":
            truncated(1)(mine / "new" / "__0_0.distcp")
        error = CheckpointError if kind != "old" else RuntimeError
        with pytest.raises(error, match="new" if kind != "old" else "metadata"):
            checkpoint.load(mine / "new", optimizer, model)
        assert_same(everything_in(model, optimizer), before, kind)


def test_a_checkpoint_that_only_one_rank_cannot_read_is_loaded_by_none(two: Path, tmp_path: Path) -> None:
    run_ranks(load_where_one_rank_sees_another_directory, RANKS, two, tmp_path)


def load_into_another_model_on_one_rank(rank: int, world: int, two: Path, work: Path) -> None:
    """The checkpoint is sound: rank 1 has a model that it does not fit. The text of that error speaks of damage."""
    model = Weights(SMALL)
    optimizer = sharded(model)
    if rank == 1:
        model.register_buffer("more", torch.zeros(1))
    mine = work / str(rank) / "all"
    shutil.copytree(two / "new", mine / "CheckpointError")
    for call in (checkpoint.load, lambda path, *args: checkpoint.resume(path.parent, *args)):
        with pytest.raises((ValueError, RuntimeError), match="does not match: missing") as raised:
            call(mine / "CheckpointError", optimizer, model)
        assert not isinstance(raised.value, CheckpointError), "it would be skipped as damaged"
        assert isinstance(raised.value, ValueError if rank == 1 else RuntimeError)


def test_what_fits_only_the_other_ranks_is_not_taken_for_damage(two: Path, tmp_path: Path) -> None:
    run_ranks(load_into_another_model_on_one_rank, RANKS, two, tmp_path)


# --- an error on one rank -----------------------------------------------------------------------------------------


class Callback:
    """Cannot be loaded without running code."""


def error_of_save(path: Path, optimizer: Any, model: nn.Module, extra: Any, asynchronous: bool) -> str:
    try:
        checkpoint.save(path, optimizer, model, extra, asynchronous=asynchronous).wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def listing(parent: Path) -> list[str]:
    dist.barrier()
    found = sorted(os.listdir(parent))
    dist.barrier()
    return found


def fail_to_save(rank: int, world: int, parent: Path, asynchronous: bool) -> None:
    model = Weights(SMALL)
    optimizer = sharded(model)
    step(model, optimizer, 1)
    checkpoint.save(parent / "first", optimizer, model, {"step": 1})
    step(model, optimizer, 2)
    failures: list[tuple[str, int, Any]] = [(f"full disk on {culprit}", culprit, {}) for culprit in range(world)]
    failures.append(("no plain data", 0, {"callback": Callback()}))
    for repetition in range(4):
        for what, culprit, extra in failures:
            for name in ("first", "second"):  # what is there stays; what is not there does not come
                with full_disk(rank == culprit and not extra):
                    told = error_of_save(parent / name, optimizer, model, {"step": 2, **extra}, asynchronous)
                claim = f"{what}, {name}, repetition {repetition}"
                assert told, f"{claim}: saved on rank {rank}"
                if rank == culprit:
                    assert ("TypeError: extra.callback" in told) if extra else ("OSError" in told), f"{claim}: {told}"
                else:
                    assert f"rank {culprit}" in told, f"{claim}: {told}"
                assert listing(parent) == ["first"], f"{claim}: left {listing(parent)}"
    checkpoint.verify(parent / "first")
    assert checkpoint.load(parent / "first", sharded(model), model)["step"] == 1
    step(model, optimizer, 2)
    checkpoint.save(parent / "second", optimizer, model, {"step": 2}, asynchronous=asynchronous).wait()
    assert listing(parent) == ["first", "second"]
    assert checkpoint.latest(parent) == parent / "second"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_on_one_rank_undoes_the_save_on_all(asynchronous: bool, tmp_path: Path) -> None:
    run_ranks(fail_to_save, RANKS, tmp_path, asynchronous)


def save_where_it_cannot_be(rank: int, world: int, parent: Path) -> None:
    model = Weights(SMALL)
    optimizer = sharded(model)
    (parent / "a file").touch()
    (parent / "mine").mkdir(exist_ok=True)
    (parent / "mine" / "thesis.txt").touch()
    (parent / "empty").mkdir(exist_ok=True)
    for path in (parent / "a file", parent / "a file" / "below", parent / "mine"):
        dist.barrier()
        told = error_of_save(path, optimizer, model, None, False)
        assert ("rank 0" in told) or (rank == 0 and path.name in told), f"{path}: {told}"
    assert listing(parent) == ["a file", "empty", "mine"]
    assert (parent / "mine" / "thesis.txt").exists()
    checkpoint.save(parent / "empty", optimizer, model)
    checkpoint.save(parent / "new" / "below" / "it", optimizer, model)
    for path in (parent / "empty", parent / "new" / "below" / "it"):
        checkpoint.verify(path)


def test_a_save_never_deletes_what_is_no_checkpoint(tmp_path: Path) -> None:
    run_ranks(save_where_it_cannot_be, 2, tmp_path)


def disagree(rank: int, world: int, parent: Path) -> None:
    """Arguments that differ, or are wrong on one rank, are told on every rank; the next save works."""
    model = Weights(SMALL)
    optimizer = sharded(model)
    mine = rank == 1
    attempts: list[tuple[str, Callable[[], Any]]] = [
        ("directory", lambda: checkpoint.save(parent / f"c{mine}", optimizer, model)),
        ("keep", lambda: checkpoint.save(parent / "c", optimizer, model, keep=2 if mine else 3)),
        ("keep", lambda: checkpoint.save(parent / "c", optimizer, model, keep=0 if mine else 3)),
        ("extra", lambda: checkpoint.save(parent / "c", optimizer, model, [1] if mine else {})),  # type: ignore
        ("asynchronous", lambda: checkpoint.save(parent / "c", optimizer, model, asynchronous=mine)),
        ("model", lambda: checkpoint.save(parent / "c", optimizer, None if mine else model)),
    ]
    for what, attempt in attempts:
        with pytest.raises((RuntimeError, ValueError, TypeError), match=what):
            attempt()
        assert listing(parent) == [], what
    checkpoint.save(parent / "c", optimizer, model)
    checkpoint.verify(parent / "c")


def test_arguments_that_differ_are_told_on_every_rank(tmp_path: Path) -> None:
    run_ranks(disagree, RANKS, tmp_path)


# --- two jobs ---------------------------------------------------------------------------------------------------------


def meet(store: dist.Store, where: str, world: int) -> None:
    store.add(where, 1)
    while store.add(where, 0) < world:
        time.sleep(0.01)


def save_beside_another_job(rank: int, world: int, path: Path, rounds: int) -> list[str]:
    """Each rank is a job of its own, as if one was started again while the old one still runs."""
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    told = []
    for number in range(rounds):
        model = Weights(LARGE)
        optimizer = plain(model)
        step(model, optimizer, 1 + rank)
        meet(store, f"round {number}", world)
        try:
            checkpoint.save(path, optimizer, model, {"job": rank})
            told.append("saved")
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
        meet(store, f"done {number}", world)
        if rank == 0:
            checkpoint.verify(path)
            found = Weights(LARGE)
            job = checkpoint.load(path, plain(found), found)["job"]
            expected = Weights(LARGE)
            step(expected, plain(expected), 1 + job)
            assert weights_digest(found) == weights_digest(expected), f"round {number}: a mixture"
        meet(store, f"checked {number}", world)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which the harness leaves
    return told


@pytest.mark.extended
def test_two_jobs_that_save_under_one_name_both_succeed_and_one_whole_checkpoint_stays(tmp_path: Path) -> None:
    for told in run_ranks(save_beside_another_job, 2, tmp_path / "c", 6, fresh=True):
        assert told == ["saved"] * 6
    assert [path.name for path in tmp_path.iterdir()] == ["c"]

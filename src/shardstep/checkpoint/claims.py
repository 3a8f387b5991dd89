"""Who may save into a directory: one rank at a time, and always the same rank of a run. Others are refused.

Nobody else takes part in the save of a plain optimizer. If every rank of a job saved its own into one directory, the
last one would win and the others' state would be lost. The same goes for two groups of ranks. So the rank that saves
(of a sharded optimizer, the first of its group) says so on the job's key-value store. The manifest says which run
and which rank wrote it, for those that come later.

The same path may be another directory on another host. A rank therefore also leaves a file beside the directory while
it saves: a rank that does not see the file of the claimant has another directory, and claims that one.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from shardstep.checkpoint.storage import directories
from shardstep.checkpoint.storage import manifest as manifests
from shardstep.checkpoint.storage.manifest import Author, CheckpointError
from shardstep.comm import process_group
from shardstep.comm.process_group import Job


class Claim:
    """The right of this process to save into a directory, until it is released."""

    def __init__(self, job: Job | None = None, key: str = "", sign: Path | None = None) -> None:
        self.author = Author(job.run, job.rank) if job is not None else None
        self._job, self._key, self._sign = job, key, sign

    def release(self) -> None:
        """Let others save. If the store is gone, so are the others."""
        if self._job is not None and self._sign is not None:
            self._sign.unlink(missing_ok=True)
            with suppress(RuntimeError):
                self._job.store.delete_key(self._key)


@contextmanager
def released_on_failure(claim: Claim) -> Iterator[None]:
    try:
        yield
    except BaseException:
        claim.release()
        raise


def claim(directory: Path) -> Claim:
    """Claim a directory for this rank. RuntimeError if another rank of the same run has it, or has saved there."""
    job = process_group.job()
    if job is None:
        return Claim()
    directory = Path(os.path.realpath(directory))
    _refuse_if_another_saved(directory, job)  # before the claim: who comes late names the one that saved
    name = f"{job.rank}.{secrets.token_hex(4)}"  # one rank may save two optimizers
    sign = _sign_of(directory, job, name)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        sign.touch()  # before the claim, so that whoever sees the claim and shares the directory sees the file
    except OSError:  # nothing can be written there; the save has the better message
        return Claim()
    try:
        key = _take(directory, job, name)
    except RuntimeError:
        sign.unlink(missing_ok=True)
        raise
    claimed = Claim(job, key, sign)
    with released_on_failure(claimed):
        _refuse_if_another_saved(directory, job)  # and again: one may have saved meanwhile
    return claimed


def _refuse_if_another_saved(directory: Path, job: Job) -> None:
    author = _author_of(directory)
    if author is not None and author.run == job.run and author.rank != job.rank:
        raise RuntimeError(_refusal(directory, job.rank, author.rank, "has saved"))


def _take(directory: Path, job: Job, name: str) -> str:
    """The key under which this rank has the claim on the directory as its host sees it."""
    path = hashlib.sha256(str(directory).encode()).hexdigest()
    for attempt in count():
        key = f"shardstep/saving/{job.run}/{path}/{attempt}"
        claimant = job.store.compare_set(key, "", name).decode()
        if claimant == name:
            return key
        if _sign_of(directory, job, claimant).exists():
            raise RuntimeError(_refusal(directory, job.rank, int(claimant.split(".")[0]), "is saving"))
    raise AssertionError("the loop has no end")


def _sign_of(directory: Path, job: Job, name: str) -> Path:
    return directory.with_name(f".{directory.name}.{job.run}.{name}{directories.CLAIM}")


def _author_of(directory: Path) -> Author | None:
    try:
        manifest = manifests.read(directory)
    except CheckpointError:  # it is damaged, and about to be replaced
        return None
    return manifest.author if manifest is not None else None


def _refusal(directory: Path, rank: int, other: int, did: str) -> str:
    return (
        f"checkpoint.save expects one rank, or one group of ranks, to save into a directory, but rank {other} of this "
        f"run {did} an optimizer in {directory}, and this is rank {rank}. Save a plain optimizer on one rank (if "
        "dist.get_rank() == 0: ...), or use a directory for each. (A ZeroRedundancyOptimizer is saved by all ranks of "
        "its group together.)"
    )

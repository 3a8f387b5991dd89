"""One rank saves a plain optimizer into a directory; the others are refused before they write.

A plain optimizer is alone: nobody else takes part in its save. If every rank of a job saves its own into one directory,
the last one would win and the others' state be gone. So a rank that saves says so on the job's key-value store, and the
manifest tells, to ranks that come later, which run and which rank wrote it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardstep import collectives
from shardstep import manifest as manifests
from shardstep.collectives import Job
from shardstep.manifest import Author, CheckpointError


class Claim:
    """The right of this process to save into a directory, until it is released."""

    def __init__(self, directory: Path, job: Job | None, key: str = "") -> None:
        self.author = Author(job.run, job.rank) if job is not None else None
        self._directory, self._job, self._key = directory, job, key

    def release(self) -> None:
        """Let others save. If the store is gone, so are the others."""
        if self._job is not None:
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
    job = collectives.job()
    if job is None:
        return Claim(directory, None)
    key = f"shardstep/saving/{hashlib.sha256(str(directory).encode()).hexdigest()}"
    holder = int(job.store.compare_set(key, "", str(job.rank)))
    if holder != job.rank:
        raise RuntimeError(_refusal(directory, job.rank, holder, "is saving"))
    claimed = Claim(directory, job, key)
    with released_on_failure(claimed):
        author = _author_of(directory)
        if author is not None and author.run == job.run and author.rank != job.rank:
            raise RuntimeError(_refusal(directory, job.rank, author.rank, "has saved"))
    return claimed


def _author_of(directory: Path) -> Author | None:
    try:
        manifest = manifests.read(directory)
    except CheckpointError:  # it is damaged, and about to be replaced
        return None
    return manifest.author if manifest is not None else None


def _refusal(directory: Path, rank: int, other: int, did: str) -> str:
    return (
        f"checkpoint.save expects one rank to save a plain optimizer into a directory, but rank {other} of this run "
        f"{did} one in {directory}, and this is rank {rank}. Save it on one rank (if dist.get_rank() == 0: ...), or "
        "give each rank a directory of its own. (A ZeroRedundancyOptimizer is saved by all ranks together.)"
    )

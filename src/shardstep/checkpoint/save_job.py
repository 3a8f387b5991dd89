"""Save a checkpoint: how what the ranks contribute becomes one directory."""

from __future__ import annotations

import json
import logging
import os
import platform
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardstep.checkpoint.claims import Claim
from shardstep.checkpoint.contribution import Contribution
from shardstep.checkpoint.leaves import LeafPlanner
from shardstep.checkpoint.storage import dcp_calls, directories, merged_metadata, safe_metadata
from shardstep.checkpoint.storage import manifest as manifests
from shardstep.checkpoint.storage.manifest import Manifest
from shardstep.checkpoint.storage.writer import Writer, Written
from shardstep.comm.consensus import RankConsensus
from shardstep.comm.process_group import Group

CALL = "checkpoint.save"
_log = logging.getLogger("shardstep")


class SaveJob:
    """One save, on this rank. ``run`` and ``start`` do the work, here or in a thread of DCP's."""

    def __init__(
        self,
        directory: Path,
        contribution: Contribution,
        group: Group,
        consensus: RankConsensus,
        keep: int | None = None,
        progress: Callable[[int], None] | None = None,
        claim: Claim | None = None,
    ) -> None:
        self._claim = claim if claim is not None else Claim()
        self._directory, self._contribution, self._keep = directory, contribution, keep
        self._group, self._consensus, self._progress = group, consensus, progress
        self._others_know = False  # that this rank failed
        self._aside: Path | None = None  # where this save writes

    def run(self) -> None:
        """Save now."""
        try:
            dcp_calls.save(self._contribution.form, self._writer(), LeafPlanner())
        except BaseException as error:
            self._undo(error)
            raise dcp_calls.inner_error(error) from None
        finally:
            self._claim.release()

    def start(self) -> Future[None]:
        """Save in a thread, what was staged."""
        form, group = self._contribution.form, self._group.process_group
        started = dcp_calls.save_in_thread(form, self._writer(), LeafPlanner(), group)
        ended: Future[None] = Future()
        started.add_done_callback(lambda done: self._end(done.exception(), ended))
        return ended

    def _end(self, error: BaseException | None, ended: Future[None]) -> None:
        """The thread has ended."""
        if self._contribution.snapshot is not None:
            self._contribution.snapshot.wait_for_all()  # after a failure some may be under way
        self._contribution.form, self._contribution.snapshot = {}, None  # the copy: the handle may be kept for long
        if error is None:
            self._claim.release()  # before anybody can know that it has ended, and save again
            ended.set_result(None)
            return
        inner = dcp_calls.inner_error(error)
        _log.error("the checkpoint %s could not be saved: %s", self._directory, inner)
        try:
            self._undo(error)
        finally:
            self._claim.release()
            ended.set_exception(inner)

    def _writer(self) -> Writer:
        snapshot = self._contribution.snapshot
        await_copy = snapshot.wait_for if snapshot is not None else None
        return Writer(self._group.rank, self._prepare, self._finish, self._reporting, self._progress, await_copy)

    def _undo(self, error: BaseException) -> None:
        """After a failure: the other ranks know, and nothing is left on disk."""
        if not self._others_know:
            self._consensus.report_failure(CALL, dcp_calls.inner_error(error))
        if not self._consensus.someone_was_absent:  # whoever failed has stopped writing, when all have come here
            with suppress(RuntimeError):
                self._consensus.check_equal(f"{CALL} (undoing it)", [])
        # Hosts may have disks of their own, so every rank deletes. But if one is absent, rank 0 may still be writing.
        if self._aside is not None and (self._group.rank == 0 or not self._consensus.someone_was_absent):
            directories.discard(self._aside)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """If this rank fails here, the others find out when they next compare."""
        with self._consensus.reporting(CALL):
            try:
                yield
            except Exception:
                self._others_know = True
                raise

    @contextmanager
    def _comparing(self) -> Iterator[None]:
        """While the ranks compare. If that fails, it fails on all of them."""
        self._others_know = True
        yield
        self._others_know = False

    def _check(self, stage: str) -> None:
        with self._comparing():
            self._consensus.check_equal(CALL, self._facts(stage))

    def _facts(self, stage: str) -> list[tuple[str, dict[str, str]]]:
        return [("save", {"directory": self._directory.name, "stage": stage})]

    def _prepare(self) -> Path:
        """Make the directory to write to, which all ranks learn from rank 0."""
        token = secrets.token_hex(4)
        with self._reporting():
            if self._group.rank == 0:
                self._aside = directories.aside_of(self._directory, token)
                directories.prepare(self._directory, token)
        with self._comparing():
            token = self._consensus.announce(CALL, self._facts("prepared"), token)
        self._aside = directories.aside_of(self._directory, token)
        with self._reporting():  # (on a file system of another host the directory may appear a moment later)
            self._aside.mkdir(parents=True, exist_ok=True)
            if self._contribution.snapshot is not None:
                self._contribution.snapshot.wait_for_leaves()
        return self._aside

    def _finish(self, written: Written) -> None:
        report = json.dumps({**merged_metadata.to_json(written), "orders": self._contribution.orders})
        with self._comparing():
            texts = self._consensus.gather(CALL, self._facts("written"), report)
        with self._reporting():
            if self._group.rank == 0:
                self._commit([json.loads(text) for text in texts])
        self._check("committed")

    def _commit(self, reports: list[dict[str, Any]]) -> None:
        """Of what all ranks have written, one checkpoint. On rank 0."""
        assert self._aside is not None, "prepared"
        aside, parent = self._aside, self._directory.parent
        self._check_seen(aside, [report["file"] for report in reports])
        metadata, files = merged_metadata.joined(reports, self._directory)
        path = aside / manifests.METADATA_NAME
        _write_durably(path, safe_metadata.dumps(metadata))
        manifest = Manifest(
            directories.next_sequence(parent),
            manifests.digest_of(path),
            files,
            self._contribution.shapes,
            self._claim.author,
            {key: order for report in reports for key, order in report["orders"].items()},
        )
        manifests.write(aside, manifest)
        for problem in manifests.quick_problems(aside, manifest):
            raise manifests.CheckpointError(problem)
        directories.commit(aside, self._directory)
        if self._keep is not None:
            directories.prune(parent, self._keep, self._directory, self._claim.author)

    def _check_seen(self, aside: Path, files: list[str]) -> None:
        """CheckpointError if what other ranks have written is not here. ``files``: by rank."""
        unseen = [rank for rank, name in enumerate(files) if not (aside / name).exists()]
        if unseen:
            ranks = ", ".join(map(str, unseen))
            raise manifests.CheckpointError(
                f"{CALL} expects a directory that all ranks see, but in {self._directory.parent} rank 0, on the host "
                f"{platform.node()}, does not see what others have written (rank {ranks}). Several hosts need a file "
                "system that all of them share."
            )


def _write_durably(path: Path, content: bytes) -> None:
    with open(path, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())

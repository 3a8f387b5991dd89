"""Saving: what the ranks write becomes one directory under its name, or nothing does.

What happens when, and where:

1. every rank prepares what it writes; rank 0 makes a directory beside the final one;
2. the ranks compare what they were asked for, or hear which one failed;
3. ``dcp.save``: they plan who writes what, and each writes one file, flushes it and sends its size and checksum;
4. rank 0 writes DCP's metadata and the manifest, and gives the directory its name (``Writer.finish``);
5. every rank returns, or raises what failed anywhere.

Steps 2 to 5 speak over a gloo group of their own, in a thread, and the caller looks at the store meanwhile: a
collective in which one rank died waits on some of the others for the group's time-out, and fails on some at once.
These say so on the store. After that nobody can save any more: the job has to start again.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import platform
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future as TorchFuture
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map

from shardstep.checkpoint import files
from shardstep.checkpoint.files import METADATA, CheckpointError, FileSum, Manifest
from shardstep.checkpoint.forms import Opaque, orders_in
from shardstep.comm import process_group
from shardstep.comm.consensus import Facts, first_difference
from shardstep.comm.host_copies import pinned_bytes
from shardstep.comm.process_group import Group
from shardstep.comm.streams import Mark, SideStream, copy_stream, has_streams
from shardstep.state.shards import StateShard

CALL = "checkpoint.save"
_LOOKING = 0.5  # seconds between two looks at the store
_GRACE = 2.0  # seconds in which a rank that waits hears of a failure in the collective itself
_log = logging.getLogger("shardstep")


# --- how the ranks speak ----------------------------------------------------------------------------------------------


class _Word(NamedTuple):
    """What one rank says before a save. (The ranks of a job pickle it for each other.)"""

    digest: str  # of the facts
    token: str  # of the directory, on rank 0
    error: str  # empty: it could prepare
    kind: str  # of error
    pending: bool  # the save before has failed here
    told: bool  # and this rank has raised that


class Line:
    """How the ranks of an optimizer speak when they save."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.broken = ""  # why nobody can speak any more
        self.process_group: dist.ProcessGroup | None = None
        if group.world_size > 1:
            self.process_group = process_group.open_side_group(group, "gloo").some_process_group
            number = group.store.add(f"shardstep/checkpoint/{group.rank}", 1)
            self._store = process_group.for_another_thread(group).store
            self._key = f"shardstep/checkpoint/{number}/failed"

    def start(self, work: Callable[[], Any]) -> Task:
        """Do something in which this rank speaks with the others, in a thread."""
        if self.broken:
            raise RuntimeError(f"{CALL} cannot speak with the other ranks any more: {self.broken}. Restart the job.")
        return Task(self, work)

    def exchange(self, word: Any) -> list[Any]:
        """Collective: every rank hears what every rank says."""
        if self.process_group is None:
            return [word]
        heard: list[Any] = [None] * self.group.world_size
        self.start(partial(dist.all_gather_object, heard, word, self.process_group)).result()
        return heard

    def tell(self, error: BaseException) -> None:
        """Tell the ranks that wait for this one that it does not come."""
        if self.process_group is not None:
            text = f"{CALL} failed on {self.group.name_of(self.group.rank)}: {type(error).__name__}: {error}"
            try:
                self._store.compare_set(self._key, "", text[:2000])
            except RuntimeError:  # the store is gone, and so are the others
                _log.warning("%s (the other ranks could not be told)", text)

    def look(self) -> str:
        """What another rank has told, if one has."""
        if self.process_group is None:
            return ""
        try:
            return self._store.get(self._key).decode() if self._store.check([self._key]) else ""
        except RuntimeError as error:
            return f"{CALL} failed: the key-value store of the job does not answer ({error})"


class Told(Exception):
    """Wraps an error of which all ranks have heard."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Task:
    """Something that runs in a thread and speaks with the other ranks there."""

    def __init__(self, line: Line, work: Callable[[], Any]) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self._line, self._ended = line, threading.Event()
        # A daemon: one that waits for a dead rank must not keep the process from ending.
        threading.Thread(target=self._run, args=(work,), name="shardstep-save", daemon=True).start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self.value = work()
        except Told as told:
            self.error = told.error
        except BaseException as error:
            self._line.tell(error)
            self.error = self.error or RuntimeError(f"{CALL} failed: {type(error).__name__}: {error}")
            self.error.__cause__ = error
        finally:
            self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end, and look meanwhile whether another rank has failed. Whether it came in time."""
        deadline = time.monotonic() + timeout if timeout is not None else float("inf")
        while not self._ended.wait(max(min(_LOOKING, deadline - time.monotonic()), 0)):
            told = self._line.look()
            if told and not self._ended.wait(_GRACE):
                self._line.broken, self.error = told, RuntimeError(told)
                self._ended.set()
            elif time.monotonic() >= deadline:
                return self._ended.is_set()
        return True

    def result(self) -> Any:
        self.wait()
        if self.error is not None:
            raise self.error
        return self.value


def agree(line: Line, facts: Facts, token: str, error: Exception | None, before: SaveHandle | None) -> str:
    """Compare with the other ranks before a save; return rank 0's token.

    If a rank could not prepare (``error``), all raise. So they do if the save before has failed and nobody was told.
    """
    failure = before.failure() if before is not None else None
    told = before is not None and before.reported
    text = f"{type(error).__name__}: {error}"[:2000] if error is not None else ""
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    words = line.exchange(_Word(digest, token, text, type(error).__name__, failure is not None, told))
    if any(word.pending for word in words) and not any(word.told for word in words):
        raise failure or RuntimeError(f"{CALL}: the save before this one failed on another rank.")
    if error is not None:
        raise error
    for rank, word in enumerate(words):
        if word.error:
            raise _failed(line.group, rank, word.error, word.kind)
    if len({word.digest for word in words}) > 1:
        opinions = [([rank], theirs) for rank, theirs in enumerate(line.exchange(facts))]
        raise RuntimeError(
            f"{CALL} expects the same on every rank, but {first_difference(opinions).text(line.group.names_of)}. Make "
            "the ranks alike and call it again on all of them."
        )
    return words[0].token


def _failed(group: Group, rank: int, text: str, kind: str) -> RuntimeError:
    """What the other ranks raise."""
    made = CheckpointError if kind == CheckpointError.__name__ else RuntimeError
    return made(f"{CALL} failed on {group.name_of(rank)}, so it is undone on every rank: {text}")


# --- files ------------------------------------------------------------------------------------------------------------


class Writer(dcp.FileSystemWriter):
    """DCP's writer. Each rank adds sizes and checksums to what it reports; ``commit`` gets them all, on rank 0."""

    def __init__(
        self,
        aside: Path,
        orders: dict[str, list[int]],
        ranks: int,
        commit: Callable[[dict[str, FileSum], dict[str, Any]], None],
        progress: files.Progress | None = None,
    ) -> None:
        super().__init__(aside, single_file_per_rank=True, sync_files=True)
        self._ranks = ranks
        self._checked = files.CheckedFileSystem(progress)
        self.fs: FileSystem = self._checked
        self._orders, self._commit = orders, commit

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[Any]]:
        results: list[Any] = super().write_data(plan, planner).value()
        done: TorchFuture[list[Any]] = TorchFuture()
        done.set_result([*results, (self._checked.written, self._orders)])
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        if len(results) != self._ranks:  # DCP saves alone, without a word, when torch.distributed is not initialized
            raise RuntimeError(
                f"{CALL} needs the process group until the save is complete, but it was destroyed. Call handle.wait() "
                "before destroy_process_group()."
            )
        written: dict[str, FileSum] = {}
        orders: dict[str, Any] = {}
        unseen = []
        for rank, rows in enumerate(results):
            its_files, its_orders = rows.pop()
            written |= its_files
            orders |= its_orders
            if not all((Path(self.path) / name).exists() for name in its_files):
                unseen.append(str(rank))
        if unseen:
            raise CheckpointError(
                f"{CALL} expects a directory that all ranks see, but in {Path(self.path).parent} rank 0, on the host "
                f"{platform.node()}, does not see what others have written (rank {', '.join(unseen)}). Several hosts "
                "need a file system that all of them share."
            )
        super().finish(metadata, results)
        self._commit({**written, METADATA: self._checked.written[f"{METADATA}.tmp"]}, orders)


class Planner(dcp.DefaultSavePlanner):
    """DCP's planner, for what is saved as it is. What it refuses has a reason in training."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return io.BytesIO(object.data) if isinstance(object, Opaque) else super().transform_object(write_item, object)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        try:
            return super().create_global_plan(all_plans)
        except ValueError as error:
            raise RuntimeError(
                f"the ranks do not hold every element of the state, each once: {error}. Was a parameter's gradient "
                "missing on some ranks only? Make gradients alike before step()."
            ) from error


class Save(NamedTuple):
    """One save, on this rank: what is written where."""

    directory: Path
    aside: Path
    form: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    keep: int | None
    line: Line
    staged: Staged | None = None
    progress: files.Progress | None = None

    def run(self) -> None:
        """Collective: write, and give the directory its name."""
        group = self.line.group
        try:
            if self.staged is not None:
                self.staged.wait()
            writer = Writer(self.aside, dict(orders_in(self.form)), group.world_size, self._commit, self.progress)
            _dcp_save(self.form, writer, self.line.process_group)
        except CheckpointException as error:  # every rank hears of it, and nobody writes any more
            files.discard(self.aside)
            failures = {rank: failure for rank, (failure, _) in error.failures.items()}
            if group.rank in failures:
                raise Told(failures[group.rank]) from None
            rank, failure = next(iter(failures.items()))
            text = f"{type(failure).__name__}: {failure}"
            raise Told(_failed(group, rank, text, type(failure).__name__)) from None
        except BaseException:
            if group.rank == 0:  # others may still write, or rank 0 still give it its name
                files.discard(self.aside)
            raise

    def _commit(self, written: dict[str, FileSum], orders: dict[str, Any]) -> None:
        """All ranks have written. On rank 0."""
        parent = self.directory.parent
        manifest = Manifest(files.next_sequence(parent), written, self.shapes, orders)
        files.write_manifest(self.aside, manifest)
        files.commit(self.aside, self.directory)
        if self.keep is not None:
            files.prune(parent, self.keep, self.directory)


def _dcp_save(form: dict[str, Any], writer: Writer, group: dist.ProcessGroup | None) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
        if group is not None:
            dcp.save(form, storage_writer=writer, planner=Planner(), process_group=group)
        elif torch.__version__ >= "2.7":
            dcp.save(form, storage_writer=writer, planner=Planner(), no_dist=True)
        else:  # in torch 2.6 only the function below takes no_dist
            state_dict_saver._save_state_dict(form, writer, no_dist=True, planner=Planner())


def save_alone(
    directory: Path,
    form: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    progress: files.Progress | None = None,
) -> None:
    """Save a form that this process has whole."""
    line, aside = Line(process_group.alone()), files.aside_of(directory, secrets.token_hex(4))
    files.prepare(directory, aside)
    try:
        Save(directory, aside, form, shapes, None, line, progress=progress).run()
    except Told as told:
        raise told.error from None


# --- in the background ------------------------------------------------------------------------------------------------


class Staged:
    """Copies of what is saved in host memory, which a thread writes while training goes on.

    Tensors of a device are copied on a stream beside the computation, and no host waits: the thread waits for the
    copies before it reads them. Whatever may change a tensor on the device comes after its copy.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, SideStream] = {}
        self._sources: list[Tensor] = []  # to live until they are copied: see comm/streams.py, "whose memory"
        self._marks: list[Mark] = []

    def copied(self, form: Any) -> Any:
        return tree_map(self._copied, form)

    def _copied(self, leaf: Any) -> Any:
        if isinstance(leaf, StateShard):
            return StateShard(leaf.shape, leaf.boxes, self._on_host(leaf.local), leaf.writes)
        return self._on_host(leaf) if isinstance(leaf, Tensor) else leaf

    def _on_host(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if not has_streams(tensor.device) or is_traceable_wrapper_subclass(tensor) or tensor.nbytes == 0:
            return tensor.to("cpu", copy=True)
        stream = self._streams.setdefault(tensor.device, copy_stream(tensor.device))
        like = torch.empty_like(tensor, device="meta")  # dense, in the order of the tensor's memory
        host = pinned_bytes(tensor.nbytes).view(tensor.dtype).as_strided(like.shape, like.stride())
        with stream.after_current():
            dense = tensor if tensor.stride() == like.stride() else torch.empty_like(tensor).copy_(tensor)
            host.copy_(dense, non_blocking=True)
        self._sources += [tensor, dense]
        return host

    def hold_back(self) -> None:
        """Whatever is enqueued next on the device comes after the copies so far."""
        for stream in self._streams.values():
            stream.join()

    def seal(self) -> Sequence[Mark]:
        """The points at which all copies are made."""
        self._marks = [stream.mark() for stream in self._streams.values()]
        return self._marks

    def wait(self) -> None:
        """Wait, on the host, until all copies are made."""
        for mark in self._marks:
            mark.wait_on_host()
        self._sources.clear()


class SaveHandle:
    """A save that goes on in the background, or is done.

    Attributes:
        directory: where the checkpoint is when it is complete.
    """

    def __init__(self, directory: Path, task: Task | None = None) -> None:
        self.directory = directory
        self.reported = False  # whether ``wait`` has raised what failed
        self._task = task

    def watch(self) -> None:
        """Have a thread wait, which the end of the program waits for, and log what fails."""
        threading.Thread(target=self._log_failure, name="shardstep-save-watch").start()

    def _log_failure(self) -> None:
        if (error := self.failure()) is not None:
            _log.error("the checkpoint %s could not be saved: %s", self.directory, error)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._task is None or self._task.done()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete and return its directory. Raises what failed on any rank.

        TimeoutError after ``timeout`` seconds, if given; the save goes on.
        """
        if self._task is not None and not self._task.wait(timeout):
            raise TimeoutError(f"{self.directory} is not complete after {timeout} s. The save goes on.")
        if (error := self.failure()) is not None:
            self.reported = True
            raise error
        return self.directory

    def failure(self) -> BaseException | None:
        """Wait for its end; what failed, if anything did."""
        if self._task is None:
            return None
        self._task.wait()
        return self._task.error

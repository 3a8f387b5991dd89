"""Save a checkpoint: what each rank contributes, and how it becomes one directory."""

from __future__ import annotations

import copy
import io
import json
import logging
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn import Module
from torch.utils._pytree import tree_map_only

from shardstep.checkpoint.adapter import OptimizerAdapter
from shardstep.checkpoint.claims import Claim
from shardstep.checkpoint.storage import dcp_versions, directories, merged_metadata
from shardstep.checkpoint.storage import manifest as manifests
from shardstep.checkpoint.storage.manifest import Manifest
from shardstep.checkpoint.storage.writer import NO_DIST_WARNING, Writer, Written
from shardstep.comm.codec import plain_option
from shardstep.comm.consensus import RankConsensus
from shardstep.comm.process_group import Group
from shardstep.params.memory_order import order_of
from shardstep.state import named
from shardstep.state.names import clean, names_of, unwrapped
from shardstep.state.shard import StateShard, shard_of_range, shard_of_whole

CALL = "checkpoint.save"
_log = logging.getLogger("shardstep")


def _plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of classes and functions only the names are saved: an optimizer that is built has its own."""
    return {key: plain_option(value) for key, value in group.items()}


class Contribution:
    """What one rank saves: its own dict for DCP, and what must be known to make one checkpoint of all."""

    def __init__(self, adapted: OptimizerAdapter, model: Module | None, extra: Mapping[str, Any] | None) -> None:
        names = names_of(adapted.optimizer.param_groups, model)
        first = adapted.group.rank == 0
        form = named.named_form(adapted.optimizer.param_groups, names, adapted.held, adapted.local, blanks=False)
        _keep_what_this_rank_writes(form["state"], adapted)
        form["state"] = {name: _leaved(entry) for name, entry in form["state"].items()}
        # A group is written by a rank that has a piece of it: into an empty one some optimizers write nothing.
        writers = [owners[0] if owners else 0 for owners in adapted.held.group_owners()]
        form["param_groups"] = {
            position: _with_leaves(_plain_options(group))
            for position, (group, writer) in enumerate(zip(form["param_groups"], writers, strict=True))
            if writer == adapted.group.rank
        }
        self.form: dict[str, Any] = {"optim": form}
        if model is not None:
            self.form["model"] = _with_leaves(_model_part(model, adapted.group))
        if extra is not None and first:
            self.form["extra"] = {key: _leaved(value) for key, value in extra.items()}
        self.orders = dict(_orders_in(form["state"], "optim", "state"))
        specs = adapted.held.layout.specs
        self.shapes = {names[adapted.held.params[spec.index]]: spec.shape for spec in specs}

    def stage(self) -> None:
        """Replace everything by a copy on the CPU, so that training can go on."""
        self.form = named.map_leaves(self.form, _staged)


def _orders_in(value: Any, *path: str) -> Iterator[tuple[str, list[int]]]:
    """The tensors of a tree whose dimensions lie in another order in memory, by key: a copy must have it, too."""
    if isinstance(value, (Mapping, list)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _orders_in(item, *path, str(key))
    elif isinstance(value, StateShard) and value.local.shape == value.shape:
        order = order_of(value.local)
        if order is not None:
            yield ".".join(path), order


class _Leaf:
    """A value that is saved as it is, by torch.save. (DCP looks into dicts: keys become texts, empty ones vanish.)"""

    def __init__(self, value: Any) -> None:
        self.value = value


def _with_leaves(values: Mapping[str, Any]) -> dict[str, Any]:
    """A dict in which every container is a leaf."""
    return {key: _Leaf(value) if isinstance(value, (Mapping, list, tuple)) else value for key, value in values.items()}


def _leaved(value: Any) -> Any:
    """A tree in which only dicts with texts as keys, and lists, that hold tensors, are looked into."""
    if not isinstance(value, (Mapping, list, tuple)):
        return value
    if isinstance(value, Mapping) and _is_tensor_tree(value) and all(isinstance(key, str) for key in value):
        return {key: _leaved(item) for key, item in value.items()}
    if isinstance(value, list) and _is_tensor_tree(value):
        return [_leaved(item) for item in value]
    return _Leaf(tree_map_only(StateShard, _whole_tensor, value))


def _whole_tensor(shard: StateShard) -> Tensor:
    if len(shard.parts) != 1 or shard.parts[0].tensor.shape != shard.shape:
        raise TypeError(
            "state of a cut parameter expects dicts with texts as keys, because others cannot be divided. Build the "
            "optimizer with shard='tensor'."
        )
    return shard.parts[0].tensor


def _on_host(value: Any) -> Any:
    """A tree with its tensors on the CPU: what is saved must not ask for a device where it is loaded."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)


def _staged(leaf: Any) -> Any:
    if isinstance(leaf, _Leaf):
        return _Leaf(copy.deepcopy(_on_host(leaf.value)))
    if isinstance(leaf, StateShard):
        return leaf.map(lambda tensor: tensor.to("cpu", copy=True))
    if isinstance(leaf, Tensor):
        return leaf.detach().to("cpu", copy=True)
    return copy.deepcopy(leaf)


def _keep_what_this_rank_writes(state: dict[str, Any], adapted: OptimizerAdapter) -> None:
    """Of a value that every owner of a piece has, the owner of the first writes it; of what all have, rank 0."""
    held, first = adapted.held, adapted.group.rank == 0
    names = iter(list(state))
    for index in held.params:
        name, piece = next(names), held.pieces.pieces.get(index)
        if piece is not None and piece.start > 0:
            state[name] = {key: value for key, value in state[name].items() if _is_tensor_tree(value)}
        if not state[name]:
            del state[name]
    for name in names:
        if not first:
            del state[name]


def _is_tensor_tree(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_is_tensor_tree, value.values()))
    return isinstance(value, Tensor) or (isinstance(value, list) and any(map(_is_tensor_tree, value)))


def _model_part(model: Module, group: Group) -> dict[str, Any]:
    """This rank's share of the model: of all parameters an equal range of elements; rank 0 has the rest.

    (Parameters are the same on every rank. Buffers may differ: rank 0's count, as in DistributedDataParallel.)
    """
    entries = {clean(key): value for key, value in unwrapped(model).state_dict(keep_vars=True).items()}
    params = {key: value for key, value in entries.items() if isinstance(value, torch.nn.Parameter)}
    total = sum(param.numel() for param in params.values())
    low, high = total * group.rank // group.world_size, total * (group.rank + 1) // group.world_size
    part: dict[str, Any] = {}
    start, seen = 0, set()
    for key, param in params.items():
        stop = start + param.numel()
        mine = max(low, start) - start, min(high, stop) - start
        if not param.is_contiguous() or param.numel() == 0:
            if low <= start < high or (group.rank == 0 and start >= total):
                part[key] = shard_of_whole(param.detach())
        elif mine[0] < mine[1]:
            part[key] = shard_of_range(tuple(param.shape), *mine, param.detach().view(-1)[slice(*mine)])
        start = stop
        seen.add(key)
    if group.rank == 0:
        part.update((key, _detached(value)) for key, value in entries.items() if key not in seen)
    return part


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


class _Planner(dcp_versions.SavePlanner):
    """DCP's planner, which refuses what could not be read again without running code."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        object = _on_host(object.value) if isinstance(object, _Leaf) else object
        data = super().transform_object(write_item, object)
        if isinstance(data, io.BytesIO):
            try:
                with dcp_versions.without_data():
                    torch.load(io.BytesIO(data.getvalue()), map_location="cpu", weights_only=True)
            except pickle.UnpicklingError as error:
                raise TypeError(
                    f"{write_item.index.fqn} expects numbers, strings, lists, dicts and tensors but got "
                    f"{type(object).__qualname__}, which cannot be loaded without running code. Save its plain data."
                ) from error
        return data


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

    def run(self) -> None:
        """Save now."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=NO_DIST_WARNING)
            # Each rank is alone for DCP. It would pickle its plans and send them; ours travel as JSON (``_finish``).
            try:
                dcp_versions.save(self._contribution.form, self._writer(), _Planner())
            except BaseException as error:
                self._undo(error)
                raise _unwrapped(error) from None
            finally:
                self._claim.release()

    def start(self) -> Future[Any]:
        """Save in a thread, what was staged."""
        warnings.filterwarnings("ignore", message=NO_DIST_WARNING)  # (it comes from the thread)
        process_group = self._group.process_group
        started = dcp_versions.save_in_thread(self._contribution.form, self._writer(), _Planner(), process_group)
        ended: Future[None] = Future()

        def end(done: Future[Any]) -> None:
            error = done.exception()
            self._contribution.form = {}  # the copy: the handle may be kept for long
            if error is None:
                self._claim.release()  # before anybody can know that it has ended, and save again
                ended.set_result(None)
                return
            _log.error("the checkpoint %s could not be saved: %s", self._directory, _unwrapped(error))
            try:
                self._undo(error)
            finally:
                self._claim.release()
                ended.set_exception(_unwrapped(error))

        started.add_done_callback(end)
        return ended

    def _writer(self) -> Writer:
        aside = directories.aside_of(self._directory)
        return Writer(aside, self._group.rank, self._prepare, self._finish, self._reporting, self._progress)

    def _undo(self, error: BaseException) -> None:
        """After a failure: the other ranks know, and nothing is left on disk."""
        if not self._others_know:
            self._consensus.report_failure(CALL, _unwrapped(error))
        if not self._consensus.someone_was_absent:  # whoever failed has stopped writing, when all have come here
            with suppress(RuntimeError):
                self._consensus.check_equal(f"{CALL} (undoing it)", [])
        if self._group.rank == 0:
            directories.discard(self._directory)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """If this rank fails here, the others find out when they next compare."""
        try:
            yield
        except Exception as error:
            self._others_know = True
            self._consensus.report_failure(CALL, error)
            raise

    def _check(self, stage: str) -> None:
        self._others_know = True  # whatever comes of it
        self._consensus.check_equal(CALL, self._facts(stage))
        self._others_know = False

    def _facts(self, stage: str) -> list[tuple[str, dict[str, str]]]:
        return [("save", {"directory": self._directory.name, "stage": stage})]

    def _prepare(self) -> None:
        with self._reporting():
            if self._group.rank == 0:
                directories.prepare(self._directory)
        self._check("prepared")
        with self._reporting():  # (on a file system of another host the directory may appear a moment later)
            directories.aside_of(self._directory).mkdir(parents=True, exist_ok=True)

    def _finish(self, written: Written) -> None:
        self._others_know = True  # whatever comes of it
        text = json.dumps({**merged_metadata.to_json(written), "orders": self._contribution.orders})
        texts = self._consensus.gather(CALL, self._facts("written"), text)
        self._others_know = False
        with self._reporting():
            if self._group.rank == 0:
                self._commit([json.loads(text) for text in texts])
        self._check("committed")

    def _commit(self, reports: list[dict[str, Any]]) -> None:
        aside, parent = directories.aside_of(self._directory), self._directory.parent
        metadata, files = merged_metadata.joined(reports, self._directory)
        content = pickle.dumps(metadata)  # DCP's format: written here, and read back by the safe reader only
        path = aside / manifests.METADATA_NAME
        with open(path, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        manifest = Manifest(
            directories.next_sequence(parent),
            manifests.digest_of(path),
            files,
            self._contribution.shapes,
            self._claim.author,
            {key: order for part in reports for key, order in part["orders"].items()},
        )
        manifests.write(aside, manifest)
        for problem in manifests.quick_problems(aside, manifest):
            raise manifests.CheckpointError(problem)
        directories.commit(self._directory)
        if self._keep is not None:
            directories.prune(parent, self._keep, self._directory, self._claim.author)


def _unwrapped(error: BaseException) -> BaseException:
    """The error inside the one that DCP wraps around it."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


class SaveHandle:
    """A save that goes on in the background, or is done."""

    def __init__(self, directory: Path, started: Future[Any] | None = None) -> None:
        self.directory = directory
        self.reported = False  # whether ``wait`` has raised what failed
        self._started = started

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._started is None or self._started.done()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is complete and return its directory. Raises what failed on any rank.

        TimeoutError after ``timeout`` seconds, if given; the save goes on.
        """
        if self._started is not None:
            try:
                error = self._started.exception(timeout)
            except FutureTimeout:  # (before Python 3.11 another class)
                raise TimeoutError(f"{self.directory} is not complete after {timeout} s. The save goes on.") from None
            if error is not None:
                self.reported = True
                raise error
        return self.directory

    def failure(self) -> BaseException | None:
        """Wait for its end; what failed, if anything did."""
        return self._started.exception() if self._started is not None else None

"""Checkpoints that every rank writes its part of, and that load at any number of ranks.

A checkpoint is a directory of torch.distributed.checkpoint (DCP) with the keys ``model``, ``optim`` and ``extra``;
torch's own tools read it. Tensors have their parameter's shape, whoever wrote which part. Besides DCP's files there is
a list of checksums (``storage/manifest.py``).

What happens when, and where, in ``save``:

1. every rank compares what it was asked for with the others;
2. rank 0 makes a directory beside the final one;
3. every rank writes its items to one file and flushes it;
4. rank 0 collects what every rank wrote, writes DCP's metadata and the checksums, checks sizes, renames;
5. every rank returns, or raises what failed anywhere.

In ``load`` every rank reads for itself. The ranks check that all could; only then anything is changed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.nn import Module

from shardstep.checkpoint import claims, inspection, model_only, save_job
from shardstep.checkpoint.adapter import OptimizerAdapter, adapter_of
from shardstep.checkpoint.claims import Claim
from shardstep.checkpoint.contribution import Contribution, contribution_of
from shardstep.checkpoint.keys import MODEL
from shardstep.checkpoint.load_job import LoadJob
from shardstep.checkpoint.save_handle import SaveHandle
from shardstep.checkpoint.save_job import SaveJob
from shardstep.checkpoint.side_channel import side_channel_of
from shardstep.checkpoint.storage import directories
from shardstep.checkpoint.storage.manifest import METADATA_NAME, CheckpointError
from shardstep.checkpoint.storage.reader import Reader, SafeLoadPlanner
from shardstep.comm import collectives
from shardstep.params.option_facts import option_facts

__all__ = [
    "CheckpointError",
    "Reader",
    "SafeLoadPlanner",
    "SaveHandle",
    "latest",
    "load",
    "load_extra",
    "load_model",
    "resume",
    "save",
    "verify",
]


def save(
    directory: str | os.PathLike[str],
    optimizer: Any,
    model: Module | None = None,
    extra: Mapping[str, object] | None = None,
    *,
    keep: int | None = None,
    asynchronous: bool = False,
) -> SaveHandle:
    """Save an optimizer, and if given its model and anything else, as a checkpoint directory.

    Collective: call on every rank of the optimizer's group, with the same arguments. (A plain ``torch.optim`` optimizer
    is saved by the process that calls, alone; other ranks that save one into the same directory are refused.) The
    directory is complete or not there. Needs hardly any memory. Opens the wrappers of Accelerate, Lightning and Fabric.
    Parameters are assumed to be the same on every rank, as in data-parallel training (``check_replicas`` checks it).

    Args:
        directory: of this checkpoint. An existing checkpoint is replaced.
        optimizer: a ZeroRedundancyOptimizer, or a plain optimizer.
        model: its parameters' names are the names in the checkpoint; it is saved as well.
        extra: plain data and tensors (step, scheduler, random state); rank 0's is saved.
        keep: delete all other checkpoints beside it but the newest, so that this many are left.
        asynchronous: copy the state to host memory and return; the rest goes on in a thread. The next save of this
            optimizer waits for it.

    Returns:
        A handle; ``handle.wait()`` returns when the checkpoint is complete. Without ``asynchronous`` it is already.
    """
    adapted = adapter_of(optimizer)
    _await_the_save_before(adapted)
    with adapted.consensus.reporting(save_job.CALL):
        path = _path_of(directory)
        _check_arguments(extra, keep)
        _check_complete(adapted)
        adapted.finish_gathers()
        contribution = contribution_of(adapted, model, extra)
        if asynchronous:
            contribution.stage(adapted.hold_state)
        with contribution.abandoned_on_failure():
            claim = claims.claim(path) if adapted.group.rank == 0 else Claim()
    with claims.released_on_failure(claim), contribution.abandoned_on_failure():
        arguments = {"directory": path.name, "keep": str(keep), "asynchronous": str(asynchronous)}
        adapted.consensus.check_equal(save_job.CALL, _facts(adapted, arguments, contribution))
        job = SaveJob(path, contribution, *side_channel_of(adapted), keep, claim=claim)
        if not asynchronous:
            job.run()
            return SaveHandle(path)
        handle = SaveHandle(path, job.start())
    adapted.kept["pending"] = handle
    return handle


def load(
    directory: str | os.PathLike[str], optimizer: Any, model: Module | None = None, strict: bool = True
) -> dict[str, Any]:
    """Load a checkpoint, saved at any number of ranks, by ``save`` or by DCP under the keys ``optim`` and ``model``.

    Collective: call on every rank of the optimizer's group. Each rank reads its pieces of the state (and the model).
    State follows the parameters' names, options their groups. If it fails on a rank it fails on all, and nothing is
    changed.

    Args:
        directory: of one checkpoint.
        optimizer: a ZeroRedundancyOptimizer, or a plain optimizer.
        model: whose names to use, and which is loaded too if the checkpoint has it.
        strict: ValueError, which lists them, if names or shapes differ. Otherwise parameters that the checkpoint lacks
            start empty, as in a new optimizer, and what only the checkpoint has is left out, with a warning.

    Returns:
        What was saved as ``extra``.
    """
    return LoadJob(_path_of(directory), adapter_of(optimizer), model, strict).run()


def load_model(directory: str | os.PathLike[str], model: Module, strict: bool = True) -> None:
    """Load the model of a checkpoint, without its optimizer: to evaluate, to serve, to fine-tune.

    Not collective, and needs no process group: a process that calls it reads for itself. If it fails, nothing is
    changed.

    Args:
        model: wrapped (DDP, ``torch.compile``) or not.
        strict: ValueError, which lists them, if names or shapes differ. Otherwise what fits is loaded, with a warning.
    """
    model_only.read_model(_path_of(directory), model, strict)


def load_extra(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """What was saved as ``extra``: to see what a checkpoint is of before a model is built for it.

    Not collective, and needs no process group.
    """
    return model_only.read_extra(_path_of(directory))


def latest(directory: str | os.PathLike[str], thorough: bool = True) -> Path | None:
    """The newest checkpoint in ``directory`` that is complete and undamaged; None if there is none.

    Not collective. ``thorough`` reads every byte of it; without, names, sizes and the metadata are checked, and damage
    inside a file is found by ``load``.
    """
    for path, manifest in directories.newest_first(_parent_of("latest", directory)):
        if not thorough or not any(directories.problems(path, manifest)):
            return path
    return None


def resume(
    directory: str | os.PathLike[str], optimizer: Any, model: Module | None = None, strict: bool = True
) -> tuple[Path, dict[str, Any]] | None:
    """Load the newest checkpoint in ``directory`` that can be read; None if there is no checkpoint at all.

    Collective: call on every rank of the optimizer's group. Damaged ones are skipped with a warning. If there are some
    and none can be read, that is a CheckpointError: starting over would be the wrong answer to a disk that is late.

    Args:
        directory: in which checkpoints lie, each in a directory of its own.
        optimizer: as in ``load``.
        model: as in ``load``.
        strict: as in ``load``.

    Returns:
        Its path, and what was saved as ``extra``.
    """
    adapted, parent = adapter_of(optimizer), _path_of(directory)
    with adapted.consensus.reporting("checkpoint.resume"):
        parent = _parent_of("resume", parent)
        found = directories.to_try(parent) if adapted.group.rank == 0 else ([], [])
    adapted.consensus.check_equal("checkpoint.resume", [("directory", {"name": parent.name})])
    if adapted.group.world_size > 1:  # what rank 0 sees counts: file systems may differ for a moment
        found = collectives.move_json(adapted.group, found, 0, None)
    names, wrong = found
    if not names and not wrong:  # another host may have a directory of its own there, with checkpoints in it
        seen = "some" if any(directories.to_try(parent)) else "none"
        adapted.consensus.check_equal("checkpoint.resume", [("directory", {"name": parent.name, "checkpoints": seen})])
    for name in names:
        try:
            found_extra = load(parent / name, optimizer, model, strict)
        except CheckpointError as error:
            wrong.append(str(error))
            continue
        for problem in wrong:
            warnings.warn(f"a checkpoint is skipped because it cannot be read: {problem}", stacklevel=2)
        return parent / name, found_extra
    if wrong:
        raise CheckpointError(
            f"{parent} has checkpoints, but none can be read: {'; '.join(wrong)}. To start over, use another directory."
        )
    return None


def verify(directory: str | os.PathLike[str]) -> None:
    """Read every byte of a checkpoint, of shardstep or DCP. CheckpointError tells what is missing or damaged.

    Not collective.
    """
    problems = inspection.problems(_path_of(directory), lambda count: None)
    if problems:
        raise CheckpointError("; ".join(problems))


def _path_of(directory: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(directory):
        raise ValueError(
            f"directory expects a path but got the address {os.fspath(directory)!r}. For object storage give "
            "optimizer.sharded_state_dict() to dcp.save with a storage writer for it."
        )
    return Path(os.path.abspath(directory))


def _parent_of(call: str, directory: str | os.PathLike[str]) -> Path:
    """The path of a directory in which there are checkpoints. ValueError if it is one itself: nothing is below it."""
    path = _path_of(directory)
    if (path / METADATA_NAME).is_file():
        raise ValueError(
            f"checkpoint.{call} expects the directory that holds the checkpoints but {path} is one of them. Pass "
            f"{path.parent}, or load this one with checkpoint.load."
        )
    return path


def _await_the_save_before(adapted: OptimizerAdapter) -> None:
    """One save at a time. If the one before failed and no rank has raised that yet, all raise it here."""
    pending: SaveHandle | None = adapted.kept.pop("pending", None)
    if pending is None:
        return
    failure = pending.failure()
    if failure is None:
        return
    reported = [[pending.reported]]
    if adapted.group.world_size > 1:
        reported = collectives.all_gather_ints(adapted.group, [pending.reported])
    if not any(row[0] for row in reported):
        raise failure


def _check_arguments(extra: Any, keep: Any) -> None:
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep expects a number from 1 on, or None to delete nothing, but got {keep!r}.")
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(f"extra expects a dict but got {type(extra).__qualname__}. Pass {{'step': ...}}.")
    if not all(isinstance(key, str) for key in extra or ()):
        raise TypeError(f"extra expects strings as keys but got {list(extra or ())}. (Its values may be anything.)")


def _check_complete(adapted: OptimizerAdapter) -> None:
    """After a step that failed half-way, state and parameters are half updated: nothing to resume from."""
    if adapted.failure:
        raise RuntimeError(
            "checkpoint.save expects an optimizer whose last step was completed, but it failed "
            f"({adapted.failure}), so its state is half updated. Resume from the last checkpoint."
        )


def _facts(
    adapted: OptimizerAdapter, arguments: dict[str, str], contribution: Contribution
) -> list[tuple[str, dict[str, str]]]:
    """What must be the same on every rank of a save."""
    arguments = {**arguments, "model": str(MODEL in contribution.form), "names": str(list(contribution.shapes))}
    # Of the options those that users set. What a step writes may differ where a rank has no parameter of a group.
    groups, defaults = adapted.optimizer.param_groups, adapted.optimizer.defaults
    users = [defaults.keys() | adapted.held.builder.given_options(position) for position in range(len(groups))]
    return [("argument", arguments), *option_facts(groups, users)]

"""Checkpoints that every rank writes its part of, and that load at any number of ranks.

A checkpoint is a directory of torch.distributed.checkpoint (DCP) with the keys ``model``, ``optim`` and ``extra``;
torch's own tools read it. DCP plans, writes and reads. What it lacks is here: a directory that is complete or not there
(``saving``), checksums, the newest one, reading without running code (``files``, ``metadata``), and state by the names
of parameters (``forms``).
"""

from __future__ import annotations

import os
import platform
import secrets
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from torch.nn import Module
from torch.optim import Optimizer

from shardstep.checkpoint import files, forms, saving
from shardstep.checkpoint.export import export_model
from shardstep.checkpoint.files import (
    EXTRA,
    MANIFEST,
    METADATA,
    MODEL,
    Checkpoint,
    CheckpointError,
    Reader,
    SafeLoadPlanner,
)
from shardstep.checkpoint.forms import ModelPlaces, OptimizerPlaces, optimizers_in
from shardstep.checkpoint.saving import Line, Save, SaveHandle, Staged
from shardstep.comm import collectives, process_group
from shardstep.comm.consensus import RankConsensus, RankFailed
from shardstep.comm.process_group import Group
from shardstep.params.option_facts import option_facts
from shardstep.state.dicts import ShardedOptimizer
from shardstep.state.names import Differences

__all__ = [
    "CheckpointError",
    "Reader",
    "SafeLoadPlanner",
    "SaveHandle",
    "export_model",
    "latest",
    "load",
    "load_extra",
    "load_model",
    "resume",
    "save",
    "verify",
]


class Wrapper(Protocol):
    """What a framework calls the optimizer, for type checkers: Lightning's and Fabric's are no ``Optimizer``."""

    @property
    def optimizer(self) -> Optimizer: ...


def save(
    directory: str | os.PathLike[str],
    optimizer: Optimizer | Wrapper,
    model: Module | None = None,
    extra: Mapping[str, object] | None = None,
    *,
    keep: int | None = None,
    asynchronous: bool = False,
) -> SaveHandle:
    """Save an optimizer, and if given its model and anything else, as a checkpoint directory.

    Collective: call on every rank of the optimizer's group, with the same arguments. (A plain ``torch.optim`` optimizer
    alone is saved by the process that calls.) The directory is complete or not there. Needs hardly any memory. Opens
    the wrappers of Accelerate, Lightning and Fabric. Parameters are assumed to be the same on every rank, as in
    data-parallel training (``check_replicas`` checks it).

    Args:
        directory: of this checkpoint. An existing checkpoint is replaced.
        optimizer: a ZeroRedundancyOptimizer, or a plain optimizer; or several, in a list or a dict.
        model: its parameters' names are the names in the checkpoint; it is saved as well.
        extra: plain data and tensors (step, scheduler, random state); rank 0's is saved.
        keep: delete all other checkpoints beside it but the newest, so that this many are left.
        asynchronous: copy the state to host memory and return; the rest goes on in a thread. The next save of this
            optimizer waits for it.

    Returns:
        A handle; ``handle.wait()`` returns when the checkpoint is complete. Without ``asynchronous`` it is already.
    """
    optimizers = optimizers_in(optimizer)
    kept = _kept_with(optimizers)
    if "line" not in kept:
        kept["line"] = Line(_everyone(optimizers))
    line: Line = kept["line"]
    before: SaveHandle | None = kept.pop("pending", None)
    if before is not None:
        before.failure()  # one save at a time; ``agree`` raises what failed
    token, staged = secrets.token_hex(4), Staged() if asynchronous else None
    path, form, shapes, facts = Path(), dict[str, Any](), dict[str, tuple[int, ...]](), list[Any]()
    error: Exception | None = None
    try:
        path = _path_of(directory)
        _check_arguments(extra, keep)
        form = _form_to_save(optimizers, model, extra, line.group, staged)
        shapes = forms.shapes_of(optimizers, model)
        facts = _facts(optimizers, path, shapes, {"keep": keep, "asynchronous": asynchronous, "model": MODEL in form})
        if line.group.rank == 0:
            files.prepare(path, files.aside_of(path, token))
    except Exception as raised:
        error = raised
    try:
        token = saving.agree(line, facts, token, error, before)
    except BaseException:
        if staged is not None:
            staged.wait()
        if path.name:
            files.discard(files.aside_of(path, token))
        raise
    job = Save(path, files.aside_of(path, token), form, shapes, keep, line, staged)
    handle = SaveHandle(path, line.start(job.run))
    if asynchronous:
        kept["pending"] = handle
        handle.watch()
    else:
        handle.wait()
    return handle


def load(
    directory: str | os.PathLike[str], optimizer: Optimizer | Wrapper, model: Module | None = None, strict: bool = True
) -> dict[str, Any]:
    """Load a checkpoint, saved at any number of ranks, by ``save`` or by DCP under the keys ``optim`` and ``model``.

    Collective: call on every rank of the optimizer's group. Each rank reads its pieces of the state (and the model).
    State follows the parameters' names, options their groups. All files are checked before anything is changed. If it
    fails on a rank it fails on all, and no optimizer is changed; the model may be.

    Args:
        directory: of one checkpoint.
        optimizer: a ZeroRedundancyOptimizer, or a plain optimizer; or several, in a list or dict as they were saved.
        model: whose names to use, and which is loaded too if the checkpoint has it.
        strict: ValueError, which lists them, if names or shapes differ. Otherwise parameters that the checkpoint lacks
            start empty, as in a new optimizer, and what only the checkpoint has is left out, with a warning.

    Returns:
        What was saved as ``extra``.
    """
    call, path, optimizers = "checkpoint.load", _path_of(directory), optimizers_in(optimizer)
    group, consensus = _everyone(optimizers), _consensus_of(optimizers)
    try:
        with consensus.reporting(call):
            if group.world_size > 1 and not path.exists():
                raise CheckpointError(
                    f"{call} expects a directory that all ranks see, but {path} does not exist on the host "
                    f"{platform.node()}. Check the path; several hosts need a file system that all of them share."
                )
            checkpoint, differences = Checkpoint(path), Differences([], [], [])
            parts = [
                OptimizerPlaces(checkpoint, key, one, model, differences, strict) for key, one in optimizers.items()
            ]
            has_model = bool(checkpoint.model_entries())
            target = ModelPlaces(checkpoint, model, differences, strict) if model is not None and has_model else None
            if model is not None and target is None:
                warnings.warn(f"{path} holds no model: the model is not changed.", stacklevel=2)
            forms.settle(differences, path, strict, stacklevel=3)
            for problem in checkpoint.problems(group.rank, group.world_size):
                raise CheckpointError(problem)
        facts = {"directory": path.name, "metadata": checkpoint.digest()}
        consensus.check_equal(call, [("checkpoint", facts)])
        with consensus.reporting(call):
            form = checkpoint.skeleton(EXTRA)
            for part in parts:
                part.add_to(form)
            if target is not None:
                form[MODEL] = target.form
            checkpoint.read_into(form)
            for part in parts:
                checkpoint.read_into(part.form_of_masters())
        consensus.check_equal(call, [("checkpoint", facts)])
    except RankFailed as error:
        if error.kind == CheckpointError.__name__:  # it is damaged where another rank reads it
            raise CheckpointError(str(error)) from error
        raise
    with consensus.reporting(call):
        if target is not None:
            target.load()
    for part in parts:
        part.load(model)
    return form.get(EXTRA) or {}


def load_model(directory: str | os.PathLike[str], model: Module, strict: bool = True) -> None:
    """Load the model of a checkpoint, without its optimizer: to evaluate, to serve, to fine-tune.

    Not collective, and needs no process group: a process that calls it reads for itself. What it reads is checked
    before the model is changed.

    Args:
        directory: of one checkpoint.
        model: wrapped (DDP, ``torch.compile``) or not.
        strict: ValueError, which lists them, if names or shapes differ. Otherwise what fits is loaded, with a warning.
    """
    if not isinstance(model, Module):
        raise TypeError(
            f"load_model expects a torch.nn.Module but got {type(model).__qualname__}. Build the model first."
        )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError("load_model expects a model with memory, but it has tensors on 'meta'. Call to_empty first.")
    checkpoint, differences = _with_model(directory), Differences([], [], [])
    target = ModelPlaces(checkpoint, model, differences, strict)
    forms.settle(differences, checkpoint.directory, strict, stacklevel=3)
    form = {MODEL: target.form}
    _check_read(checkpoint, form)
    checkpoint.read_into(form)
    target.load()


def load_extra(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """What was saved as ``extra``: to see what a checkpoint is of before a model is built for it.

    Not collective, and needs no process group.
    """
    checkpoint = Checkpoint(_path_of(directory))
    form = checkpoint.skeleton(EXTRA)
    _check_read(checkpoint, form)
    checkpoint.read_into(form)
    return form.get(EXTRA) or {}


def latest(directory: str | os.PathLike[str], thorough: bool = True) -> Path | None:
    """The newest checkpoint in ``directory`` that is complete and undamaged; None if there is none.

    Not collective. ``thorough`` reads every byte of it; without, names, sizes and the metadata are checked, and damage
    inside a file is found by ``load``.
    """
    for found in files.newest_first(_parent_of("latest", directory)):
        with suppress(CheckpointError):
            checkpoint = Checkpoint(found.path)
            if not thorough or not any(checkpoint.problems()):
                return found.path
    return None


def resume(
    directory: str | os.PathLike[str], optimizer: Optimizer | Wrapper, model: Module | None = None, strict: bool = True
) -> tuple[Path, dict[str, Any]] | None:
    """Load the newest checkpoint in ``directory`` that can be read; None if there is no checkpoint at all.

    Collective: call on every rank of the optimizer's group. Damaged ones are skipped with a warning. If there are some
    and none can be read, that is a CheckpointError: starting over would be the wrong answer to a disk that is late.

    Args:
        directory: with checkpoints, each in a directory of its own.
        optimizer: as in ``load``.
        model: as in ``load``.
        strict: as in ``load``.

    Returns:
        Its path, and what was saved as ``extra``.
    """
    call, optimizers = "checkpoint.resume", optimizers_in(optimizer)
    group, consensus = _everyone(optimizers), _consensus_of(optimizers)
    with consensus.reporting(call):
        parent = _parent_of("resume", directory)
        found = files.newest_first(parent) if group.rank == 0 else []
    consensus.check_equal(call, [("directory", {"name": parent.name})])
    names = [(one.path.name, one.manifest is not None) for one in found]
    if group.world_size > 1:  # what rank 0 sees counts: file systems may differ for a moment
        names = collectives.move_json(group, names, 0, None)
    if not names:  # another host may have a directory of its own there, with checkpoints in it
        seen = "some" if files.newest_first(parent) else "none"
        consensus.check_equal(call, [("directory", {"name": parent.name, "checkpoints": seen})])
    wrong: list[str] = []
    for name, has_manifest in names:
        try:
            extra = load(parent / name, optimizer, model, strict)
        except CheckpointError as error:
            wrong.append(str(error))
            continue
        for problem in wrong:
            warnings.warn(f"a checkpoint is skipped because it cannot be read: {problem}", stacklevel=2)
        if not has_manifest:
            warnings.warn(f"{parent / name} has no {MANIFEST}: its age was told by its time.", stacklevel=2)
        return parent / name, extra
    if wrong:
        raise CheckpointError(
            f"{parent} has checkpoints, but none can be read: {'; '.join(wrong)}. To start over, use another directory."
        )
    return None


def verify(directory: str | os.PathLike[str]) -> None:
    """Read every byte of a checkpoint, of shardstep or DCP. CheckpointError tells what is missing or damaged.

    Not collective.
    """
    if problems := files.problems(_path_of(directory)):
        raise CheckpointError("; ".join(problems))


# --- who takes part ---------------------------------------------------------------------------------------------------


def _sharded(optimizers: Mapping[str, Optimizer]) -> list[ShardedOptimizer]:
    return [optimizer for optimizer in optimizers.values() if isinstance(optimizer, ShardedOptimizer)]


def _everyone(optimizers: Mapping[str, Optimizer]) -> Group:
    """The ranks that save and load together: all of the mesh, if there is one."""
    groups = [optimizer.engine.sharded.ranks.everyone for optimizer in _sharded(optimizers)]
    if not groups:
        return process_group.alone()
    if not all(process_group.same_ranks(groups[0], group) for group in groups):
        raise ValueError("checkpoint expects optimizers of the same ranks. Save those of other ranks by themselves.")
    return groups[0]


def _consensus_of(optimizers: Mapping[str, Optimizer]) -> RankConsensus:
    sharded = _sharded(optimizers)
    return sharded[0].engine.consensus if sharded else RankConsensus(process_group.alone())


def _kept_with(optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """What saves keep with the first optimizer: "line" to the other ranks, and "pending", a save in the background."""
    for optimizer in _sharded(optimizers):
        return optimizer.saves
    first = next(iter(optimizers.values()))
    return vars(first).setdefault(forms.KEPT, {})


# --- arguments --------------------------------------------------------------------------------------------------------


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
    if (path / METADATA).is_file():
        raise ValueError(
            f"checkpoint.{call} expects the directory that holds the checkpoints but {path} is one of them. Pass "
            f"{path.parent}, or load this one with checkpoint.load."
        )
    return path


def _check_arguments(extra: Any, keep: Any) -> None:
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep expects a number from 1 on, or None to delete nothing, but got {keep!r}.")
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(f"extra expects a dict but got {type(extra).__qualname__}. Pass {{'step': ...}}.")
    if not all(isinstance(key, str) for key in extra or ()):
        raise TypeError(f"extra expects strings as keys but got {list(extra or ())}. (Its values may be anything.)")


def _form_to_save(
    optimizers: Mapping[str, Optimizer], model: Module | None, extra: Any, group: Group, staged: Staged | None
) -> dict[str, Any]:
    """What this rank writes; with ``staged`` copies of it."""
    for optimizer in _sharded(optimizers):
        if failure := optimizer.engine.progress.failure:  # half updated: nothing to resume from
            raise RuntimeError(
                f"checkpoint.save expects an optimizer whose last step was completed, but it failed ({failure}), so "
                "its state is half updated. Resume from the last checkpoint."
            )
        optimizer.engine.wait_for_parameters()
    form = forms.whole_form(optimizers, model, extra, group)
    if staged is None:
        return form
    # Parameters, buffers and options may be changed by anybody, and buffers are by forward: they are copied first, and
    # whatever follows waits for that. State is changed by steps and loads, which wait for its copies themselves.
    states = forms.take_states(form)
    form = staged.copied(form)
    staged.hold_back()
    forms.put_states(form, staged.copied(states))
    marks = staged.seal()
    for optimizer in _sharded(optimizers):
        optimizer.engine.progress.copies.add(marks)
    if len(_sharded(optimizers)) < len(optimizers) or any(o.engine.progress.is_captured for o in _sharded(optimizers)):
        staged.hold_back()  # nobody tells us when those step
    return form


def _facts(
    optimizers: Mapping[str, Optimizer], path: Path, shapes: Mapping[str, Any], arguments: Mapping[str, Any]
) -> list[tuple[str, dict[str, str]]]:
    """What must be the same on every rank of a save."""
    told = {"directory": path.name, "names": str(list(shapes)), **{key: str(value) for key, value in arguments.items()}}
    facts = [("argument", told)]
    for optimizer in _sharded(optimizers):
        # Of the options those that users set. What a step writes may differ where a rank has no parameter of a group.
        groups, builder = optimizer.param_groups, optimizer.engine.sharded.builder
        users = [optimizer.defaults.keys() | builder.given_options(position) for position in range(len(groups))]
        facts += option_facts(groups, users)
    return facts


def _with_model(directory: str | os.PathLike[str]) -> Checkpoint:
    checkpoint = Checkpoint(_path_of(directory))
    if not checkpoint.model_entries():
        raise ValueError(f"{checkpoint.directory} was saved without a model. Save with model=...")
    return checkpoint


def _check_read(checkpoint: Checkpoint, form: Mapping[str, Any]) -> None:
    """CheckpointError if something is damaged that is going to be read."""
    roots = tuple(form)
    keys = [key for key in checkpoint.entries if str(checkpoint.paths[key][0]) in roots]
    for problem in checkpoint.reader.damaged_items(set(keys)):
        raise CheckpointError(problem)

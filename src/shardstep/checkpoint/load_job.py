"""Load a checkpoint: each rank reads what it needs of it, and nothing is changed until all ranks have read."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module

from shardstep.checkpoint.adapter import OptimizerAdapter
from shardstep.checkpoint.keys import EXTRA, GROUPS, MODEL, OPTIM, STATE
from shardstep.checkpoint.load_targets import StateTargets, model_targets, settle
from shardstep.checkpoint.model_masters import add_masters_of_model
from shardstep.checkpoint.model_swap import ModelSwap
from shardstep.checkpoint.open_checkpoint import Checkpoint
from shardstep.checkpoint.storage.manifest import CheckpointError
from shardstep.comm.consensus import RankFailed
from shardstep.params.masters import ROUNDING
from shardstep.state import names as named
from shardstep.state.names import Differences, names_of, positions_of, saved_names

CALL = "checkpoint.load"
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"}  # written into groups
_OF_NO_CLASS = {*_OF_SCHEDULERS, *ROUNDING}


class LoadJob:
    """One load, on this rank."""

    def __init__(self, directory: Path, adapted: OptimizerAdapter, model: Module | None, strict: bool) -> None:
        self._directory, self._adapted, self._model, self._strict = directory, adapted, model, strict

    def run(self) -> dict[str, Any]:
        """Read, compare, change; return what was saved as ``extra``.

        Collective: call on every rank of the group.
        """
        consensus = self._adapted.consensus
        with consensus.reporting(CALL):
            self._check_seen()
            checkpoint = Checkpoint(self._directory)
            form = self._targets(checkpoint)
            checkpoint.read_into(form)
            if MODEL in form:
                state = form[OPTIM][STATE]
                add_masters_of_model(checkpoint, self._adapted.held, self._names(form[OPTIM][GROUPS]), state)
            digest = checkpoint.digest()
        self._check_same(digest)
        with consensus.reporting(CALL):
            undo = self._load_model(form)
        try:
            self._adapted.load(self._renamed(form[OPTIM]), self._model, self._strict)
        except BaseException:
            undo()
            raise
        return form.get(EXTRA) or {}

    def _check_seen(self) -> None:
        """CheckpointError if this host does not see the directory, which others may do."""
        if self._adapted.group.world_size > 1 and not self._directory.exists():
            raise CheckpointError(
                f"{CALL} expects a directory that all ranks see, but {self._directory} does not exist on the host "
                f"{platform.node()}. Check the path; several hosts need a file system that all of them share."
            )

    def _load_model(self, form: Mapping[str, Any]) -> Callable[[], None]:
        """Load the model, if there is one on both sides. Return a function that undoes it."""
        if self._model is None or MODEL not in form:
            return lambda: None
        swap = ModelSwap(self._model, form[MODEL], self._strict)
        swap.load()
        return swap.undo

    def _check_same(self, digest: str) -> None:
        """That all ranks have read, and the same checkpoint."""
        facts = [("checkpoint", {"directory": self._directory.name, "metadata": digest})]
        try:
            self._adapted.consensus.check_equal(CALL, facts)
        except RankFailed as error:
            if error.kind == CheckpointError.__name__:  # it is damaged where another rank reads it
                raise CheckpointError(str(error)) from error
            raise

    def _targets(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Places for everything that this rank needs. ValueError if the checkpoint does not fit and ``strict``."""
        groups = checkpoint.groups()
        self._check_options(groups)
        names = self._names(groups)
        differences = Differences(*named.compare_names(groups, names.values()), [])
        state = StateTargets(checkpoint, self._adapted.held, differences).by_name(groups, names)
        form: dict[str, Any] = {OPTIM: {STATE: state, GROUPS: groups}, **checkpoint.skeleton(EXTRA)}
        if self._model is not None and checkpoint.has_model:
            form[MODEL] = model_targets(checkpoint, self._model, differences)
        elif self._model is not None:
            warnings.warn(f"{self._directory} holds no model: the model is not changed.", stacklevel=4)
        settle(differences, self._directory, self._strict, stacklevel=5)
        return form

    def _check_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """ValueError if the options are those of another class, and ``strict``.

        One side may have options that the other lacks: torch adds some. Both do if the classes differ.
        """
        optimizer = self._adapted.optimizer
        saved = {key for group in groups for key in group}
        mine = {key for group in optimizer.param_groups for key in group}
        missing, foreign = sorted(set(optimizer.defaults) - saved), sorted(saved - mine - _OF_NO_CLASS)
        if groups and missing and foreign and self._strict:
            raise ValueError(
                f"{self._directory} expects an optimizer with the options {', '.join(foreign)}, which this one has "
                f"not; {', '.join(missing)} of this one were not saved. Was another class saved? "
                "checkpoint.load_model loads the model alone."
            )

    def _names(self, groups: Sequence[Mapping[str, Any]]) -> dict[Tensor, str]:
        """What the checkpoint calls the parameters.

        If it was made from a plain state dict, which knows no names, that is their position.
        """
        param_groups = self._adapted.optimizer.param_groups
        names = names_of(param_groups, self._model)
        saved = [str(name) for group in groups for name in group["params"]]
        found = saved_names(names.values(), saved)
        called = {param: found.get(name, name) for param, name in names.items()}
        if set(saved) == set(called.values()):
            return called
        counts, mine = ([len(group["params"]) for group in of] for of in (groups, param_groups))
        if counts == mine and saved == [str(position) for position in range(len(names))]:
            return positions_of(param_groups)
        named.check_named_alike(groups, list(names.values()))
        return called

    def _renamed(self, form: dict[str, Any]) -> dict[str, Any]:
        """The form with the optimizer's names for parameters."""
        names = names_of(self._adapted.optimizer.param_groups, self._model)
        called = self._names(form[GROUPS])
        new = {called[param]: name for param, name in names.items()}
        groups = [{**group, "params": [new.get(one, one) for one in group["params"]]} for group in form[GROUPS]]
        return {STATE: {new.get(name, name): value for name, value in form[STATE].items()}, GROUPS: groups}

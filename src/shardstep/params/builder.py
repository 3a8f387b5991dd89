"""The local optimizer: what the probe knows of its class, and making it over this rank's pieces."""

from __future__ import annotations

import copy
import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardstep.layout.specs import ParamSpec
from shardstep.params import groups
from shardstep.params.local_optimizer import inner_optimizers, options_of, run_step, undisturbed
from shardstep.params.master_modes import MasterMode, mode_of
from shardstep.params.probe import Verdict, examine
from shardstep.state import subclasses

logger = logging.getLogger(__name__)
NOTHING_TO_PROBE = Verdict(False, True, "it has nothing to probe")


class OptimizerBuilder:
    """Builds the user's optimizer class over pieces, and answers what it does, as the probe found out."""

    def __init__(self, optimizer_class: Callable[..., Optimizer], defaults: dict[str, Any]) -> None:
        _check_optimizer_class(optimizer_class)
        self._optimizer_class = optimizer_class
        self._defaults = defaults
        self._verdicts: list[Verdict] = []  # per group
        self._options: list[dict[str, Any]] = []  # per group, as the user gave them
        self._wishes: list[str] = []  # per group: the granularity that the user wished
        self._chosen: list[str] = []  # and that it has
        self._modes: list[MasterMode] = []  # per group: with masters the optimizer steps float32
        self._probed: dict[str, Verdict] = {}
        self._state_classes: dict[str, type] = {}  # tensor subclasses that the optimizer makes as state, by name

    @property
    def class_name(self) -> str:
        return getattr(self._optimizer_class, "__qualname__", repr(self._optimizer_class))

    # --- what it does ---------------------------------------------------------------------------------------------

    def choose(
        self, group: dict[str, Any], wish: str, options: dict[str, Any], mode: MasterMode = MasterMode.NONE
    ) -> str:
        """The granularity of a further group: what the user wished, checked, or what the probe says.

        ``options``: those that the user gave. What a group does not say, the optimizer itself fills in: some have other
        defaults for some groups (Muon).
        """
        like = _stepped_tensor(group["params"], mode)
        verdict = NOTHING_TO_PROBE if like is None else self._verdict(like, wish, options)
        if wish == "element" and not verdict.elementwise and like is not None:
            raise ValueError(
                f"shard='element' expects an element-wise optimizer, but for {self._optimizer_class.__name__} "
                f"{verdict.reason}. Use shard='tensor' or 'auto'."
            )
        self._verdicts.append(verdict)
        self._options.append(options)
        self._wishes.append(wish)
        self._modes.append(mode)
        self._chosen.append("element" if verdict.elementwise and wish != "tensor" else "tensor")
        return self._chosen[-1]

    def examine_again(self, params: Sequence[Sequence[Tensor]]) -> None:
        """The parameters, by group, are on another device: there the optimizer may have other kernels.

        RuntimeError if parameters were cut and may not be cut there.
        """
        verdicts = list(self._verdicts)
        for position, wish in enumerate(self._wishes):
            like = _stepped_tensor(params[position], self._modes[position])
            if like is None:
                continue
            verdicts[position] = found = self._verdict(like, wish, self._options[position])
            if self._chosen[position] == "element" and not found.elementwise:
                raise RuntimeError(
                    f"{self._optimizer_class.__name__} expects its parameters whole on {like.device.type}, where "
                    f"{found.reason}, but they were cut before the model was moved. Move the model first and build the "
                    "optimizer afterwards, or pass shard='tensor'."
                )
        self._verdicts = verdicts

    def _verdict(self, like: Tensor, wish: str, options: dict[str, Any]) -> Verdict:
        key = repr((_shape_of_options(options), like.dtype, like.device, wish == "tensor"))
        if key not in self._probed:
            self._probed[key] = examine(self._optimizer_class, self._defaults, options, like, vouched=wish == "tensor")
        return self._probed[key]

    def log_what_was_not_checked(self) -> None:
        """Say that parameters are kept whole because the probe could not step the optimizer, if so."""
        unseen = next((verdict for verdict in self._verdicts if verdict.unseen), None)
        if unseen is not None:
            logger.warning(
                "%s: %s. Its parameters are kept whole, as with shard='tensor'; that it updates every tensor by itself "
                "was not checked.",
                getattr(self._optimizer_class, "__name__", self._optimizer_class),
                unseen.reason,
            )

    def forget(self, count: int) -> None:
        """Keep what is known of the first ``count`` groups."""
        for known in (self._verdicts, self._options, self._wishes, self._chosen, self._modes):
            del known[count:]

    def given_options(self, position: int) -> dict[str, Any]:
        """The options that the user gave a group."""
        return self._options[position]

    @property
    def has_eager_state(self) -> bool:
        """Whether the optimizer makes state when it is built."""
        return any(verdict.eager for verdict in self._verdicts)

    @property
    def consumes(self) -> bool:
        """Whether a step of the optimizer takes the gradients away."""
        return any(verdict.consumes for verdict in self._verdicts)

    @property
    def moves_first(self) -> bool:
        """Whether a step moves the parameters before it calls the closure."""
        return any(verdict.moves_first for verdict in self._verdicts)

    @property
    def notes(self) -> set[str]:
        """Options in which the optimizer notes which parameters it has: each rank's own."""
        return {key for verdict in self._verdicts for key in verdict.notes}

    @property
    def splittable(self) -> bool:
        """Whether the optimizer may be stepped bucket by bucket: the same on every rank."""
        return all(verdict.splittable for verdict in self._verdicts)

    # --- making it ------------------------------------------------------------------------------------------------

    def build(self, local_groups: Sequence[dict[str, Any]], all_groups: Sequence[dict[str, Any]]) -> Optimizer:
        """The local optimizer over these groups. ValueError if it is none that can be sharded.

        ``all_groups``: the groups with the whole parameters of all ranks.
        """
        try:
            optimizer = self._optimizer_class(list(local_groups), **self._defaults)
        except Exception as error:
            _refuse_inner(self._over_all(all_groups))  # one of those inside may want what others own
            if not isinstance(error, (AttributeError, IndexError, KeyError)):  # about what the user chose: it tells
                raise
            raise ValueError(
                f"{getattr(self._optimizer_class, '__name__', self._optimizer_class)} cannot be sharded: building it "
                f"over parameter groups failed ({type(error).__name__}: {error}). Use an optimizer that takes groups."
            ) from error
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"optimizer_class expects to build a torch.optim.Optimizer but built a {type(optimizer).__qualname__}. "
                "Pass the class of an optimizer, e.g. torch.optim.AdamW."
            )
        _refuse_inner(optimizer)
        return optimizer

    def _over_all(self, all_groups: Sequence[dict[str, Any]]) -> Optimizer | None:
        """The optimizer over whole parameters, without memory for them; None if it cannot be built so."""
        try:
            return self.fresh_optimizer(
                [{**g, "params": [torch.empty_like(p, device="meta") for p in g["params"]]} for g in all_groups]
            )
        except Exception:
            return None

    def fresh_optimizer(self, param_groups: Sequence[dict[str, Any]]) -> Optimizer:
        """The local optimizer as it would be newly built: for optimizers that make state when they are built."""
        return self._optimizer_class([dict(group) for group in param_groups], **copy.deepcopy(self._defaults))

    def blank_state(self, spec: ParamSpec, like: Tensor, param_groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state that the optimizer would make for a parameter, or a piece, like ``like``."""
        return blank_state(self.fresh_optimizer, spec, like, param_groups)

    def find_state_class(self, spec: ParamSpec, param: Tensor, name: str) -> type | None:
        """The tensor subclass of that name which the optimizer makes as state: of ``param``, if of no other."""
        for found in (kind for verdict in self._verdicts for kind in verdict.subclasses):
            self._state_classes[subclasses.name_of(found)] = found
        if name not in self._state_classes:
            try:
                blank = self.blank_state(spec, param, self._options)
            except Exception:  # it cannot be asked so: then it is not known to make any
                return None
            for found in subclasses.classes_in(blank):
                self._state_classes[subclasses.name_of(found)] = found
        return self._state_classes.get(name)


def blank_state(
    fresh_optimizer: Callable[[Sequence[dict[str, Any]]], Optimizer],
    spec: ParamSpec,
    like: Tensor,
    param_groups: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """The state that an optimizer makes in its first step for a tensor like ``like``.

    A twin of the optimizer makes it, for a copy that is thrown away.
    """
    scratch = torch.nn.Parameter(torch.zeros_like(like))
    scratch.grad = torch.zeros_like(scratch)
    options = {**copy.deepcopy(options_of(param_groups[spec.group])), "params": [scratch]}
    if spec.name is not None:
        options["param_names"] = [spec.name]
    with undisturbed(like.device):
        twin = fresh_optimizer([options])
        run_step(twin, lambda: scratch.grad.sum())  # type: ignore[union-attr]
    return dict(twin.state.get(scratch, {}))


def _stepped_tensor(params: Sequence[Tensor], mode: MasterMode) -> Tensor | None:
    """What stands in a probe for the tensors that the optimizer steps: a parameter, or a master."""
    like = groups.first_floating(params)
    if like is None or mode_of(like.dtype, mode) is MasterMode.NONE:
        return like
    return torch.empty(0, dtype=torch.float32, device=like.device)


def _refuse_inner(optimizer: Optimizer | None) -> None:
    for name, inner in inner_optimizers(optimizer):
        raise ValueError(
            f"{type(optimizer).__qualname__} cannot be sharded: it has a {type(inner).__qualname__} of its own "
            f"inside (.{name}), whose state would not be sharded and not be saved. Use another optimizer."
        )


def _check_optimizer_class(optimizer_class: Any) -> None:
    if isinstance(optimizer_class, type) and not issubclass(optimizer_class, Optimizer):
        raise ValueError(
            f"optimizer_class expects a subclass of torch.optim.Optimizer but got {optimizer_class.__qualname__}. "
            "Functional optimizers are not needed here: pass the ordinary class."
        )
    if not callable(optimizer_class):
        raise TypeError(f"optimizer_class expects a class but got {optimizer_class!r}. Pass e.g. torch.optim.AdamW.")


def check_spelling(optimizer_class: Any, given: Iterable[str], ours: Sequence[str]) -> None:
    """TypeError if an argument that the class does not know is spelled nearly like one of ours."""
    try:
        known = inspect.signature(optimizer_class).parameters
    except (TypeError, ValueError):  # it does not tell
        return
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for key in given:
        meant = [] if key in known else difflib.get_close_matches(key, [*ours, *known], 1)
        if meant and meant[0] in ours:
            raise TypeError(
                f"neither ZeroRedundancyOptimizer nor {getattr(optimizer_class, '__name__', optimizer_class)} has an "
                f"argument {key!r}: did you mean `{meant[0]}`?"
            )


def _shape_of_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options with numbers reduced to zero or not: groups that differ in a learning rate need one probe."""

    def reduce(value: Any) -> Any:
        if isinstance(value, float):
            return value != 0
        return f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else value

    return {key: reduce(value) for key, value in options.items()}

"""What a program is made of: operations, written as one would type them. A program is a list of them.

Every operation means the same to both sides: to DDP with the plain optimizer, and to ours (see ``sides.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import dataclass_transform


@dataclass_transform(frozen_default=True)
class Operation:
    """Prints as a call that builds it again, without what is left at its default."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, repr=False)(cls)

    def __repr__(self) -> str:
        fields = self.__dataclass_fields__.values()
        changed = [f"{field.name}={getattr(self, field.name)!r}" for field in fields if self._differs(field)]
        return f"{type(self).__name__}({', '.join(changed)})"

    def _differs(self, field: Any) -> bool:
        return getattr(self, field.name) != field.default


class Backward(Operation):
    """Forward and backward of the next batch.

    ``skip`` leaves branches of the model out, on the rank ``only`` or (None) on all. ``sync=False`` is inside
    ``no_sync``. ``scaled``: the loss goes through a GradScaler. ``bad``: on that rank the loss is infinite, and
    every other time the gradient of a single element.
    ``late``: that rank is late with one half of the gradients.
    """

    skip: tuple[int, ...] = ()
    only: int | None = None
    sync: bool = True
    scaled: bool = False
    bad: int | None = None
    late: int | None = None


class Clip(Operation):
    """``how`` is "torch" (``torch.nn.utils.clip_grad_norm_``), "ours" (the optimizer's), or "value"."""

    max_norm: float = 0.01
    norm_type: float = 2.0
    how: Literal["torch", "ours", "value"] = "torch"


class DropGradient(Operation):
    """``param.grad = None``, on every rank: the next step leaves this parameter alone."""

    index: int = 0


class Unscale(Operation):
    pass


class ScalerStep(Operation):
    """``scaler.step(optimizer)`` and ``scaler.update()``."""


class Step(Operation):
    """``closure`` runs zero_grad, forward and backward; ``factor`` is an argument of the optimizer's own step.

    ``late``: that rank comes late, and on every rank threads read the parameters afterwards.
    """

    closure: bool = False
    factor: float | None = None
    late: int | None = None


class Loop(Operation):
    """``count`` whole iterations. Nothing in between looks at anything, so nobody waits who need not."""

    count: int = 4
    clip: Literal["", "torch", "ours"] = ""
    aside: bool = False  # on a stream of the program's own
    before: tuple[bool, ...] = ()  # backwards before the last one of an iteration: synchronized, or in no_sync
    late: int | None = None  # the rank that is late in every other backward


class ZeroGrad(Operation):
    set_to_none: bool = True
    by: Literal["optimizer", "model"] = "optimizer"


class Schedule(Operation):
    pass


class SetLr(Operation):
    group: int = 0
    factor: float = 0.5


class Freeze(Operation):
    """``requires_grad_(False)``, and DDP is built anew, as the guide asks for."""

    index: int = 0


class Unfreeze(Operation):
    """All that is frozen; DDP is built anew."""


class Rewrap(Operation):
    """DDP is built anew around the same model, with buckets of another size, and so is its hook."""

    ddp_cap: float | None = None  # MiB


class Rebuild(Operation):
    """A new optimizer over the same model takes over from the old one, whose gradients nobody has waited for."""


class Move(Operation):
    """The parameters get other memory, as ``model.to(device)`` does it; on a device: to the CPU and back.

    ``cleared``: gradients are there, and are cleared in between.
    """

    cleared: bool = False


class AddGroup(Operation):
    """The layer that the optimizer did not have until now."""


class Edit(Operation):
    index: int = 0
    factor: float = 2.0


class Swap(Operation):
    """Other weights for a moment, as an average of them is evaluated or saved; state is read meanwhile."""

    factor: float = 1.5


class LoadModel(Operation):
    """``load_state_dict`` of the model, with other values."""


class Consolidate(Operation):
    to: int = 0


class Exchange(Operation):
    """Each side loads the state dict of the other: ours consolidates, the plain optimizer loads it, and back."""

    to: int = 0


class Resume(Operation):
    """Save, throw everything away, build it on other ``ranks``, in another ``mode``, ... (None: as it was), load."""

    how: Literal["checkpoint", "asynchronous", "resume", "sharded", "get_state_dict", "torch"] = "checkpoint"
    ranks: int | None = None
    mode: str | None = None
    cap: float | None = None
    shard: str | None = None
    masters: str | None = None


class Plain(Operation):
    """A checkpoint of ours is loaded into a plain optimizer and model of one process; ``back``: and one of theirs."""

    back: bool = False


class Save(Operation):
    """A checkpoint of this moment, which ``Restore`` goes back to; ``asynchronous`` trains on while it is written.

    ``beside``: rank 0 saves something else into the same folder meanwhile.
    """

    asynchronous: bool = False
    beside: bool = False


class Restore(Operation):
    """Load the last ``Save`` into the optimizer and the model as they are now."""


class CopyModel(Operation):
    """Copy the model, and pickle it: an optimizer leaves nothing on it that cannot be."""


class Raise(Operation):
    """An exception in forward or backward, on ``rank`` or (None) on all; the batch is skipped with zero_grad."""

    place: Literal["forward", "backward"] = "forward"
    rank: int | None = None


class RaiseInStep(Operation):
    """The optimizer's own step raises on every rank, before or after it has changed anything; then another is made."""

    when: Literal["before", "after"] = "before"


class Uneven(Operation):
    """Epochs in a Join context, which is entered for each: rank r has ``batches[r % len(batches)]`` batches."""

    batches: tuple[int, ...] = (2, 1)
    clip: float | None = None
    epochs: int = 1
    closure: bool = False  # for the steps


class Switch(Operation):
    """``eval()`` and ``train()`` of a schedule-free optimizer."""


class Look(Operation):
    """Compare everything that can be asked for: gradients, state, groups, memory, replicas."""


OPERATIONS = (
    Backward, Clip, DropGradient, Unscale, ScalerStep, Step, Loop, ZeroGrad, Schedule, SetLr, Freeze, Unfreeze, Rewrap,
    Rebuild, Move, AddGroup, Edit, Swap, LoadModel, Consolidate, Exchange, Resume, Plain, Save, Restore, CopyModel,
    Raise, RaiseInStep, Uneven, Switch, Look,
)  # fmt: skip
Program = tuple[Operation, ...]

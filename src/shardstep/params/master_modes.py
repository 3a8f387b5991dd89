"""``master_weights``, as users give it: which parameters of which group get which kind of master."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

MasterWeights = torch.dtype | Literal["remainder", "stochastic"] | None
NARROW = (torch.bfloat16, torch.float16)
_WISHES = "None, torch.float32, 'remainder' or 'stochastic'"


class MasterMode(Enum):
    """What a rank keeps beside a 16-bit parameter."""

    NONE = "none"  # the optimizer steps the parameter itself
    FLOAT32 = "float32"  # the master
    REMAINDER = "remainder"  # the 16 bits that the parameter lacks
    STOCHASTIC = "stochastic"  # nothing: results are rounded at random

    @property
    def is_kept(self) -> bool:
        """Whether there is a master that outlives a step."""
        return self in (MasterMode.FLOAT32, MasterMode.REMAINDER)


class MasterSettings(NamedTuple):
    """What the arguments of the optimizer say about masters."""

    mode: MasterMode = MasterMode.NONE  # of groups that say nothing
    seed: int = 0

    def check_seed(self, modes: Sequence[MasterMode]) -> None:
        """ValueError if there is a seed but nothing to use it for. ``modes``: of the groups."""
        if self.seed and MasterMode.STOCHASTIC not in (self.mode, *modes):
            raise ValueError(
                f"rounding_seed={self.seed} expects master_weights='stochastic', of the optimizer or of a group: "
                "nothing else rounds at random. Add it, or drop rounding_seed."
            )


def checked_settings(master_weights: Any, rounding_seed: Any) -> MasterSettings:
    """ValueError if an argument is invalid."""
    if not isinstance(rounding_seed, int) or isinstance(rounding_seed, bool):
        raise ValueError(f"rounding_seed expects a whole number but got {rounding_seed!r}. Leave it out for 0.")
    return MasterSettings(checked_mode(master_weights), rounding_seed)


def checked_mode(wish: Any, where: str = "") -> MasterMode:
    """ValueError unless it is one of the ways to keep masters. ``where``: of which group, for messages."""
    if wish is None:
        return MasterMode.NONE
    if wish == torch.float32:
        return MasterMode.FLOAT32
    if wish in ("remainder", "stochastic"):
        return MasterMode(wish)
    raise ValueError(f"master_weights{where} expects {_WISHES} but got {wish!r}. Use torch.float32 if unsure.")


def take_modes(groups: Sequence[dict[str, Any]], usual: MasterMode, first: int = 0) -> list[MasterMode]:
    """Remove our own key from the groups: it is no option of the optimizer. Return the mode of each.

    ``usual``: of groups that say nothing. ``first``: the position of the first of these groups. ValueError for a mode
    that a group cannot have.
    """
    modes = []
    for position, group in enumerate(groups, first):
        where = f" of parameter group {position}"
        said = "master_weights" in group
        mode = checked_mode(group.pop("master_weights"), where) if said else usual
        modes.append(_fitting_mode(mode, group["params"], where, must_fit=said))
    dtypes = _dtypes(groups)
    if usual is not MasterMode.NONE and first == 0 and dtypes and not set(dtypes) & set(NARROW):
        raise ValueError(
            f"master_weights={_text(usual)} expects bfloat16 or float16 parameters, but all groups have "
            f"{_names(dtypes)} only, which the optimizer steps as they are. Drop it, or convert the model first."
        )
    return modes


def _fitting_mode(mode: MasterMode, params: Sequence[Any], where: str, must_fit: bool) -> MasterMode:
    dtypes = _dtypes([{"params": params}])
    narrow = [dtype for dtype in dtypes if dtype in NARROW]
    if mode is MasterMode.NONE or (not narrow and not must_fit):
        return MasterMode.NONE
    if not narrow:
        raise ValueError(
            f"master_weights={_text(mode)}{where} expects bfloat16 or float16 parameters, but the group has "
            f"{f'{_names(dtypes)} only' if dtypes else 'no parameters'}. Drop master_weights for this group."
        )
    if mode is MasterMode.REMAINDER and torch.float16 in narrow:
        raise ValueError(
            f"master_weights='remainder'{where} expects bfloat16 parameters, whose bits are half of a float32's, but "
            "the group has float16. Use torch.float32, or 'stochastic'."
        )
    return mode


def can_be_master(dtype: torch.dtype) -> bool:
    """Whether a parameter of this dtype holds a float32 master exactly: then it is one itself."""
    return dtype in (torch.float32, torch.float64)


def mode_of(dtype: torch.dtype, mode: MasterMode) -> MasterMode:
    """Of one parameter of a group with this mode."""
    return mode if dtype in NARROW else MasterMode.NONE


def _dtypes(groups: Sequence[dict[str, Any]]) -> list[torch.dtype]:
    items = (item for group in groups for item in group["params"])
    tensors = (item[1] if isinstance(item, tuple) else item for item in items)
    return list(dict.fromkeys(tensor.dtype for tensor in tensors if isinstance(tensor, Tensor)))


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _text(mode: MasterMode) -> str:
    return "torch.float32" if mode is MasterMode.FLOAT32 else repr(mode.value)

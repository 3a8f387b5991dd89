"""Is an optimizer element-wise? Step a tensor whole, and the same tensor in pieces, and compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from shardstep.params.comparison import close, equal, tensors_in
from shardstep.params.trials import EARLY, STEPS, Build, gradients_of_range, run_trial, scattered
from shardstep.state.subclasses import is_subclass

# A multiple of every usual block, and with both sides multiples: what quantizes only such tensors does it here.
LARGE_SHAPE = (128, 128)
PHASE = 5  # which numbers the tensor has
_ALIGNMENT = 64  # of cuts, see layout/partition.py


class _Cut(NamedTuple):
    """A tensor, and pieces of it."""

    shape: tuple[int, int]
    pieces: tuple[tuple[int, int], ...]
    steps: int


_CUTS = (
    # Most optimizers that are not element-wise show it on a few elements, and some of them are slow on more.
    _Cut((24, 16), ((0, 64), (64, 384)), EARLY),
    # Pieces that are multiples of 4096 like the whole, and one that begins, ends and counts at no multiple of anything.
    _Cut(LARGE_SHAPE, ((0, 4096), (4096, 16384), (4098, 9100)), EARLY),
    # 12480 elements, cut at 64 and 4224: multiples of the alignment that cuts have, but not of 256 or 2048, on which
    # 8-bit optimizers quantize in blocks; with pieces below and above the 4096 elements from which they do.
    _Cut((65, 192), ((0, 64), (64, 4224), (4224, 12480)), STEPS),
)


def why_not_elementwise(build: Build, like: Tensor) -> str:
    """The first thing in which a piece differs from the same range of the whole, or nothing."""
    return next(filter(None, (_difference_in_pieces(build, like, cut) for cut in _CUTS)), "")


def _difference_in_pieces(build: Build, like: Tensor, cut: _Cut) -> str:
    # A cut that is not aligned may differ by a few roundings: kernels compute the last elements of a tensor otherwise.
    tensor = scattered(cut.shape, like, PHASE)
    count = tensor.numel()
    whole = run_trial(build, [tensor], gradients_of_range(cut.shape, 0, count), cut.steps)
    for low, high in cut.pieces:
        values = tensor.view(-1)[low:high]
        try:
            piece = run_trial(build, [values], gradients_of_range(cut.shape, low, high), cut.steps)
        except Exception as error:
            return f"a flat piece of a tensor cannot be stepped ({error})"
        same = equal if low % _ALIGNMENT == high % _ALIGNMENT == 0 else close
        if not same(piece.params[0], whole.params[0].view(-1)[low:high]):
            return "the updated parameter differs between whole and in pieces"
        reason = _difference_of_states(piece.states[0], whole.states[0], slice(low, high), count, same)
        if reason:
            return reason
    return ""


def _difference_of_states(piece: dict, whole: dict, span: slice, count: int, same: Callable[[Any, Any], bool]) -> str:
    if piece.keys() != whole.keys():
        return "the names of its states differ between whole and in pieces"
    for key, value in whole.items():
        if is_subclass(value):
            return f"state {key!r} is a {type(value).__name__}, which is carried whole"
        if not isinstance(value, Tensor) and any(tensor.dim() > 0 for tensor in tensors_in(value)):
            return f"state {key!r} is a {type(value).__name__} with tensors in it, which is carried whole"
        if isinstance(value, Tensor) and value.dim() > 0:
            if value.numel() != count:
                return f"state {key!r} has another shape than the parameter"
            value = value.reshape(-1)[span]
            if piece[key].shape != value.shape:
                return f"state {key!r} of a piece has another shape than the piece"
        if not same(piece[key], value):
            return f"state {key!r} differs between whole and in pieces"
    return ""

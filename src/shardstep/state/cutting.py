"""A parameter's state, cut with the parameter.

A state entry with as many elements as its parameter is cut and joined with it. A 0-dim tensor or a plain value is
one copy per parameter, kept as the optimizer wrote it. Any other shape, and a tensor subclass, is opaque: legal while
its parameter is whole.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardstep.layout.boxes import boxes_of
from shardstep.layout.specs import ParamSpec, Piece
from shardstep.params.tensor_subclasses import FindClass, closed, is_opened, opened
from shardstep.state.shard import StateShard


def check_cut_with(leaf: Tensor, spec: ParamSpec, piece: Piece) -> None:
    """RuntimeError if a tensor of the live state is neither whole, nor one number, nor cut as its parameter is."""
    if not piece.whole and leaf.dim() > 0 and leaf.numel() != piece.numel:
        raise RuntimeError(
            f"the state of {spec.label} expects tensors of {piece.numel} elements or 0-dim ones, because the "
            f"parameter is cut, but got shape {tuple(leaf.shape)}. Build the optimizer with shard='tensor'."
        )


def local_part(entry: Any, spec: ParamSpec, piece: Piece, find_class: FindClass, where: str) -> Any:
    """The part of one parameter's full state, wherever it comes from, that belongs to ``piece``: copies of it."""
    return closed(_cut(opened(entry), spec, piece, where), find_class, spec.label)


def _cut(value: Any, spec: ParamSpec, piece: Piece, name: str) -> Any:
    if is_opened(value) and not piece.whole:
        raise ValueError(
            f"state {name} of {spec.label} is a tensor subclass, which cannot be cut with the parameter. Build the "
            "optimizer with shard='tensor'."
        )
    if isinstance(value, dict):
        return {key: _cut(item, spec, piece, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_cut(item, spec, piece, f"{name}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, StateShard):
        return _memory_of(value, spec, piece, name)
    return _cut_tensor(value, spec, piece, name) if isinstance(value, Tensor) else value


def _cut_tensor(tensor: Tensor, spec: ParamSpec, piece: Piece, name: str) -> Tensor:
    if piece.whole or tensor.dim() == 0:
        return tensor.detach().clone()
    if tensor.numel() != spec.numel:
        raise ValueError(
            f"state {name} of {spec.label} expects {spec.numel} elements, as the parameter of shape {spec.shape} has, "
            f"but got shape {tuple(tensor.shape)}. A state of another shape needs shard='tensor'."
        )
    return tensor.detach().reshape(-1)[piece.start : piece.stop].clone()


def _memory_of(shard: StateShard, spec: ParamSpec, piece: Piece, name: str) -> Tensor:
    """What a sharded form has for ``piece``: the memory itself, which was made to be loaded into."""
    expected = [] if shard.dim() == 0 or piece.whole else boxes_of(spec.shape, piece.start, piece.stop)
    if expected and [part.box for part in shard.parts] != expected:
        raise ValueError(
            f"state {name} of {spec.label} expects elements {piece.start} to {piece.stop} of the parameter on this "
            f"rank but got {shard!r}. Load into what this optimizer's sharded_state_dict() returns."
        )
    return shard.local

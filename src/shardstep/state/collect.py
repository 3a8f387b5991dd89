"""Optimizer state: cut it, join it, collect it.

A state entry with as many elements as its parameter is cut and joined with it. A 0-dim tensor or a plain value is
one copy per parameter, kept as the optimizer wrote it. Any other shape, and a tensor subclass, is opaque: legal while
its parameter is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardstep.comm import collectives
from shardstep.comm.codec import decode, dtype_name, dtype_of, encode
from shardstep.comm.process_group import Group
from shardstep.layout.boxes import boxes_of
from shardstep.layout.specs import Layout, ParamSpec, Piece
from shardstep.params.memory_order import empty_in_order, order_of
from shardstep.params.pieces import LocalPieces
from shardstep.params.tensor_subclasses import FindClass, closed, is_opened, opened
from shardstep.state.shard import StateShard

# A tensor of at least this size travels in chunks of its own, straight from and to its memory.
_LARGE_BYTES = 1024 * 1024


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
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, StateShard):
        return _held(value, spec, piece, name)
    if piece.whole or value.dim() == 0:
        return value.detach().clone()
    if value.numel() != spec.numel:
        raise ValueError(
            f"state {name} of {spec.label} expects {spec.numel} elements, as the parameter of shape {spec.shape} has, "
            f"but got shape {tuple(value.shape)}. A state of another shape needs shard='tensor'."
        )
    return value.detach().reshape(-1)[piece.start : piece.stop].clone()


def _held(shard: StateShard, spec: ParamSpec, piece: Piece, name: str) -> Tensor:
    """What a sharded form holds for ``piece``: the memory itself, which was made to be loaded into."""
    expected = [] if shard.dim() == 0 or piece.whole else boxes_of(spec.shape, piece.start, piece.stop)
    if expected and [part.box for part in shard.parts] != expected:
        raise ValueError(
            f"state {name} of {spec.label} expects elements {piece.start} to {piece.stop} of the parameter on this "
            f"rank but got {shard!r}. Load into what this optimizer's sharded_state_dict() returns."
        )
    return shard.local


def collect(
    group: Group,
    layout: Layout,
    described: tuple[list, list[Tensor]],
    *,
    to: int | None,
    chunk_bytes: int,
    find_class: Callable[[int, str], type | None],
) -> dict[int, dict]:
    """Full states by parameter index, on the CPU, at rank ``to`` (None: at every rank); elsewhere empty.

    Collective: call on every rank of the group. Each rank in turn sends the recipient its header, as JSON, and then
    its tensors, as bytes, in chunks.

    Args:
        described: what this rank contributes, from ``describe``.
        to: the rank that receives.
        chunk_bytes: the most that any rank holds besides its state and, on the recipient, the result.
        find_class: by parameter index and name, the class of state that the live optimizer makes.
    """
    header, tensors = described
    receives = to is None or to == group.rank
    assembly = _Assembly(layout)
    for source in range(group.world_size):
        received = collectives.move_json(group, header, source, to)
        targets = assembly.place(received) if receives else []
        if source == group.rank:
            spans = [_bytes_of(tensor) for tensor in tensors]
            for target, span in zip(targets, spans, strict=receives):
                target.copy_(span)
            _stream(group, spans, source, to, chunk_bytes)
        elif receives:
            _stream(group, targets, source, to, chunk_bytes)
    return assembly.result(find_class) if receives else {}


def describe(
    shard: LocalPieces, layout: Layout, state: Mapping[Any, Any], only: int | None = None
) -> tuple[list, list[Tensor]]:
    """What this rank has: a header (JSON data) and the tensors it speaks of, in order.

    ``only``: of one parameter.
    """
    header: list[Any] = []
    tensors: list[Tensor] = []
    for index, piece in sorted(shard.pieces.items()):
        entry = state.get(shard.tensors[index])
        if not entry or only not in (None, index):
            continue
        leaves: list[Tensor] = []

        def lift(tensor: Tensor, leaves: list[Tensor] = leaves) -> int:
            leaves.append(tensor)
            return len(leaves) - 1

        spec = layout.spec_of[index]
        try:
            tree = encode(opened(dict(entry)), lift)
        except TypeError as error:
            raise TypeError(f"the state of {spec.label} {error}") from error
        for leaf in leaves:
            if not piece.whole and leaf.dim() > 0 and leaf.numel() != piece.numel:
                raise RuntimeError(
                    f"the state of {spec.label} expects tensors of {piece.numel} elements or 0-dim ones, because the "
                    f"parameter is cut, but got shape {tuple(leaf.shape)}. Build the optimizer with shard='tensor'."
                )
        orders = [order_of(leaf) if piece.whole else None for leaf in leaves]
        rows = zip(leaves, orders, strict=True)
        metas = [[dtype_name(leaf.dtype), list(leaf.shape), order] for leaf, order in rows]
        header.append([index, piece.start, piece.stop, tree, metas])
        tensors += [leaf if order is None else leaf.permute(order) for leaf, order in zip(leaves, orders, strict=True)]
    return header, tensors


class _Assembly:
    """Full states in the making: memory for what arrives, joined by parameter."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._trees: dict[int, Any] = {}
        self._leaves: dict[int, dict[int, Tensor]] = {}
        self._arrived: dict[int, int] = {}  # elements of the parameter whose state has come

    def place(self, header: list) -> list[Tensor]:
        """Where the bytes of the tensors that ``header`` speaks of belong, in order."""
        targets = []
        for index, start, stop, tree, metas in header:
            spec = self._layout.spec_of[index]
            if start == 0:  # values of which there is one per parameter come from its first piece
                self._trees[index] = tree
            self._arrived[index] = self._arrived.get(index, 0) + stop - start
            for position, (dtype, shape, order) in enumerate(metas):
                targets.append(self._target(spec, (start, stop), position, dtype_of(dtype), shape, order))
        return targets

    def _target(
        self,
        spec: ParamSpec,
        span: tuple[int, int],
        position: int,
        dtype: torch.dtype,
        shape: list[int],
        order: list[int] | None,
    ) -> Tensor:
        leaves, (start, stop) = self._leaves.setdefault(spec.index, {}), span
        if stop - start == spec.numel:
            whole = torch.empty(shape, dtype=dtype) if order is None else empty_in_order(shape, order, dtype)
            leaves[position] = whole
            return _bytes_of(whole if order is None else whole.permute(order))
        if not shape:
            value = torch.empty(shape, dtype=dtype)
            if start == 0:
                leaves[position] = value
            return _bytes_of(value)
        if position not in leaves:
            leaves[position] = torch.empty(spec.shape, dtype=dtype)
        return _bytes_of(leaves[position].view(-1)[start:stop])

    def result(self, find_class: Callable[[int, str], type | None]) -> dict[int, dict]:
        for index, elements in self._arrived.items():
            spec = self._layout.spec_of[index]
            if elements != spec.numel:
                raise RuntimeError(
                    f"{spec.label} expects state for all of its {spec.numel} elements, but the ranks hold {elements}. "
                    "Its gradient was missing on some ranks only: make gradients alike on all ranks before step()."
                )
        states = {}
        for index in sorted(self._trees):
            entry = decode(self._trees[index], self._leaves.get(index, {}))
            states[index] = closed(entry, partial(find_class, index), self._layout.spec_of[index].label)
        return states


def _stream(group: Group, spans: Sequence[Tensor], source: int, to: int | None, chunk_bytes: int) -> None:
    """Move byte tensors from one rank to another (or all), at most ``chunk_bytes`` at a time."""
    if source == to:
        return
    for chunk in chunks([span.numel() for span in spans], chunk_bytes):
        views = [spans[i][low:high] for i, low, high in chunk]
        if len(views) == 1:
            collectives.move(group, views[0], source, to)
            continue
        packed = torch.empty(sum(view.numel() for view in views), dtype=torch.uint8)
        if group.rank == source:
            torch.cat([view.cpu() for view in views], out=packed)
        collectives.move(group, packed, source, to)
        if group.rank != source:
            for view, part in zip(views, packed.split([view.numel() for view in views]), strict=True):
                view.copy_(part)


def chunks(sizes: Sequence[int], chunk_bytes: int) -> Iterator[list[tuple[int, int, int]]]:
    """Ranges (which, start, stop) of tensors of these sizes, grouped into chunks; both sides compute the same.

    Large tensors are sliced and travel alone; small ones travel together.
    """
    small: list[tuple[int, int, int]] = []
    filled = 0
    for i, size in enumerate(sizes):
        if size >= min(_LARGE_BYTES, chunk_bytes):
            for low in range(0, size, chunk_bytes):
                yield [(i, low, min(low + chunk_bytes, size))]
        elif size > 0:
            if filled + size > chunk_bytes:
                yield small
                small, filled = [], 0
            small.append((i, 0, size))
            filled += size
    if small:
        yield small


def _bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's bytes, 1D, over the same memory if it is contiguous."""
    return tensor.detach().reshape(-1).view(torch.uint8)

"""Collect the full state: each rank in turn sends what it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardstep.comm import collectives
from shardstep.comm.byte_views import bytes_of
from shardstep.comm.codec import decode, dtype_name, dtype_of, encode
from shardstep.comm.process_group import Group
from shardstep.layout.specs import Layout, ParamSpec, Piece
from shardstep.params.memory_order import empty_in_order, order_of
from shardstep.params.pieces import LocalPieces
from shardstep.params.tensor_subclasses import closed, opened
from shardstep.state.chunks import bring, stream
from shardstep.state.cutting import check_cut_with


class Described(NamedTuple):
    """What a rank has: a header (JSON data) and the tensors it speaks of, in order."""

    header: list[Any]
    tensors: list[Tensor]


def describe(shard: LocalPieces, layout: Layout, state: Mapping[Any, Any], only: int | None = None) -> Described:
    """What this rank has. ``only``: of one parameter."""
    described = Described([], [])
    for index, piece in sorted(shard.pieces.items()):
        entry = state.get(shard.tensors[index])
        if entry and only in (None, index):
            _describe_entry(described, entry, layout.spec_of[index], piece)
    return described


def _describe_entry(described: Described, entry: Mapping[str, Any], spec: ParamSpec, piece: Piece) -> None:
    leaves: list[Tensor] = []

    def lift(tensor: Tensor) -> int:
        leaves.append(tensor)
        return len(leaves) - 1

    try:
        tree = encode(opened(dict(entry)), lift)
    except TypeError as error:
        raise TypeError(f"the state of {spec.label} {error}") from error
    rows = []
    for leaf in leaves:
        check_cut_with(leaf, spec, piece)
        order = order_of(leaf) if piece.whole else None
        rows.append([dtype_name(leaf.dtype), list(leaf.shape), order, leaf.device.type])
        described.tensors.append(leaf if order is None else leaf.permute(order))
    described.header.append([spec.index, piece.start, piece.stop, tree, rows])


def collect(
    group: Group,
    layout: Layout,
    described: Described,
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
    receives = to is None or to == group.rank
    assembly = _Assembly(layout)
    for source in range(group.world_size):
        received = collectives.move_json(group, described.header, source, to)
        targets = assembly.make_room(received) if receives else []
        if source == group.rank:
            spans = [bytes_of(tensor) for tensor in described.tensors]
            if receives:
                bring(spans, targets, chunk_bytes)
            stream(group, spans, _kinds(described.header), source, to, chunk_bytes)
        elif receives:
            stream(group, targets, _kinds(received), source, to, chunk_bytes)
    return assembly.result(find_class) if receives else {}


def _kinds(header: list[Any]) -> list[str]:
    """On what type of device its source has each tensor that a header speaks of."""
    return [kind for *_, rows in header for *_, kind in rows]


class _Assembly:
    """Full states in the making: memory for what arrives, joined by parameter."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._trees: dict[int, Any] = {}
        self._leaves: dict[int, dict[int, Tensor]] = {}
        self._arrived: dict[int, int] = {}  # elements of the parameter whose state has come

    def make_room(self, header: list) -> list[Tensor]:
        """Memory for the bytes of the tensors that ``header`` speaks of, in order."""
        targets = []
        for index, start, stop, tree, rows in header:
            spec = self._layout.spec_of[index]
            if start == 0:  # values of which there is one per parameter come from its first piece
                self._trees[index] = tree
            self._arrived[index] = self._arrived.get(index, 0) + stop - start
            for position, (dtype, shape, order, _) in enumerate(rows):
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
            return bytes_of(whole if order is None else whole.permute(order))
        if not shape:
            value = torch.empty(shape, dtype=dtype)
            if start == 0:
                leaves[position] = value
            return bytes_of(value)
        if position not in leaves:
            leaves[position] = torch.empty(spec.shape, dtype=dtype)
        return bytes_of(leaves[position].view(-1)[start:stop])

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

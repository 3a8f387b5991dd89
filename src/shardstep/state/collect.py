"""Collect the full state on the CPU of one rank, or of all: each rank in turn sends what it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardstep.comm import collectives
from shardstep.comm.byte_views import bytes_of, dense_stride
from shardstep.comm.codec import decode, dtype_name, dtype_of, encode
from shardstep.comm.process_group import Group
from shardstep.layout.specs import Layout, ParamSpec, Piece
from shardstep.params.pieces import LocalPieces
from shardstep.state.shards import check_cut_with
from shardstep.state.subclasses import closed, opened


class Described(NamedTuple):
    """What a rank has: a header (JSON data), and the tensors that it lists, as bytes."""

    header: list[Any]  # per parameter: index, range of elements, tree of its state, rows about its tensors
    spans: list[Tensor]


def describe(pieces: LocalPieces, layout: Layout, state: Mapping[Any, Any], only: int | None = None) -> Described:
    """What this rank has. ``only``: of one parameter."""
    described = Described([], [])
    for index, piece in sorted(pieces.pieces.items()):
        entry = state.get(pieces.tensors[index])
        if entry and only in (None, index):
            _describe_entry(described, entry, layout.spec_of[index], piece)
    return described


def _describe_entry(described: Described, entry: Mapping[str, Any], spec: ParamSpec, piece: Piece) -> None:
    rows: list[Any] = []

    def lift(tensor: Tensor) -> int:
        check_cut_with(tensor, spec, piece)
        stride = dense_stride(tensor) if piece.whole else None
        rows.append([dtype_name(tensor.dtype), list(tensor.shape), stride, tensor.device.type])
        described.spans.append(_bytes_of(tensor, stride))
        return len(rows) - 1

    try:
        tree = encode(opened(dict(entry)), lift)
    except TypeError as error:
        raise TypeError(f"the state of {spec.label} {error}") from error
    described.header.append([spec.index, piece.start, piece.stop, tree, rows])


def _bytes_of(tensor: Tensor, stride: Any) -> Tensor:
    """The bytes of a tensor; with the ``stride`` of a dense one, in the order of its memory."""
    return bytes_of(tensor if stride is None else tensor.as_strided((tensor.numel(),), (1,)))


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

    Collective: call on every rank of the group. Each rank in turn sends its header, as JSON, and then its tensors, as
    bytes, in chunks.

    Args:
        described: what this rank contributes, from ``describe``.
        to: the rank that receives.
        chunk_bytes: the most that any rank holds besides its state and, on the recipient, the result.
        find_class: by parameter index and name, the class of state that the live optimizer makes.
    """
    receives = to is None or to == group.rank
    assembly = _Assembly(layout)
    for source in range(group.world_size):
        header = collectives.move_json(group, described.header, source, to)
        targets = assembly.make_room(header) if receives else []
        if source == group.rank:
            for target, span in zip(targets, described.spans, strict=receives):
                target.copy_(span)
        if header is not None and source != to and group.world_size > 1:
            kinds = [kind for *_, rows in header for *_, kind in rows]
            _send(group, described.spans if source == group.rank else targets, kinds, source, to, chunk_bytes)
    return assembly.result(find_class) if receives else {}


def _send(
    group: Group, spans: Sequence[Tensor], kinds: Sequence[str], source: int, to: int | None, chunk_bytes: int
) -> None:
    """Copy byte tensors from rank ``source``, where they are on devices of these ``kinds``, to host memory elsewhere.

    They travel through the backend of their device if the group has one for it, else through the host.
    """
    for kind in sorted(set(kinds)):
        chosen = [span for span, its_kind in zip(spans, kinds, strict=True) if its_kind == kind]
        native = kind != "cpu" and kind in group.backends
        device = torch.device(kind, torch.get_device_module(kind).current_device()) if native else torch.device("cpu")
        for chunk in chunks([span.numel() for span in chosen], chunk_bytes):
            parts = [chosen[which][start:stop] for which, start, stop in chunk]
            if group.rank == source:
                packed = torch.cat([part.to(device) for part in parts])
            else:
                packed = torch.empty(sum(part.numel() for part in parts), dtype=torch.uint8, device=device)
            collectives.copy_together(group, [packed], source, to)
            if group.rank != source:
                for part, arrived in zip(parts, packed.split([part.numel() for part in parts]), strict=True):
                    part.copy_(arrived)


def chunks(sizes: Sequence[int], chunk_bytes: int) -> Iterator[list[tuple[int, int, int]]]:
    """Ranges (which, start, stop) of tensors of these sizes, one chunk after another; both sides compute the same."""
    chunk: list[tuple[int, int, int]] = []
    room = chunk_bytes
    for which, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            chunk.append((which, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield chunk
                chunk, room = [], chunk_bytes
    if chunk:
        yield chunk


class _Assembly:
    """Full states in the making: memory for what arrives, joined by parameter."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._trees: dict[int, Any] = {}
        self._leaves: dict[int, dict[int, Tensor]] = {}
        self._arrived: dict[int, int] = {}  # elements of the parameter whose state has arrived

    def make_room(self, header: list) -> list[Tensor]:
        """Memory for the bytes of the tensors that ``header`` lists, in order."""
        targets = []
        for index, start, stop, tree, rows in header:
            if start == 0:  # what exists once per parameter comes from its first piece
                self._trees[index] = tree
            self._arrived[index] = self._arrived.get(index, 0) + stop - start
            for position, (dtype, shape, stride, _) in enumerate(rows):
                targets.append(self._target(index, (start, stop), position, dtype_of(dtype), shape, stride))
        return targets

    def _target(
        self, index: int, span: tuple[int, int], position: int, dtype: torch.dtype, shape: list[int], stride: Any
    ) -> Tensor:
        spec, leaves, (start, stop) = self._layout.spec_of[index], self._leaves.setdefault(index, {}), span
        if stop - start == spec.numel:
            empty = (
                torch.empty(shape, dtype=dtype) if stride is None else torch.empty_strided(shape, stride, dtype=dtype)
            )
            leaves[position] = empty
            return _bytes_of(empty, stride)
        if not shape:
            value = torch.empty((), dtype=dtype)
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

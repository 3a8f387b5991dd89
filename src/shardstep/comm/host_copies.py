"""Copies between a device and host memory through a few pinned buffers, while the host works on what is there already.

Only from and to pinned memory a device copies without making the host wait. Pinned memory is scarce, so what passes
through it does so in two buffers of a bounded size: one is copied while the other is written, sent or read. On the CPU,
and on devices without streams, nothing of this happens and tensors are what they are.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor

from shardstep.comm.streams import Mark, SideStream, copy_stream, has_streams, mark_current

BUFFER_BYTES = 16 * 2**20
_ALIGNMENT = 64  # of each tensor in a buffer, as in torch's own allocations

Tag = TypeVar("Tag")


def pinned_bytes(count: int) -> Tensor:
    """Host memory that the accelerator copies from and to by itself; ordinary memory where there is no such thing."""
    try:
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)
    except (RuntimeError, NotImplementedError):  # then a copy makes the host wait, and is right all the same
        return torch.empty(count, dtype=torch.uint8)


def aligned(count: int) -> int:
    """Bytes that a tensor of so many takes in a buffer."""
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def view_as(memory: Tensor, like: Tensor) -> Tensor:
    """Bytes as a contiguous tensor of the dtype and shape of ``like``."""
    return memory.view(like.dtype).view(like.shape)


def on_host(
    tensors: Iterable[tuple[Tag, Tensor | None]], buffer_bytes: int = BUFFER_BYTES
) -> Generator[tuple[Tag, Tensor | None], None, None]:
    """Tensors in their order, each as a contiguous one in host memory that is valid until the next is asked for.

    A contiguous tensor of the CPU is itself. Those of a device are copied on a stream beside the computation, after
    what the current stream has when they are taken from ``tensors``: one buffer while the caller works with the other.
    ``tensors`` runs ahead of what comes out by the two buffers. None, and the tags, pass through. Whoever may stop
    half-way closes it: then what follows on the current stream comes after the copies that are under way.
    """
    staging: _Staging[Tag] = _Staging(buffer_bytes)
    try:
        for tag, tensor in tensors:
            if staging.is_empty and (tensor is None or not has_streams(tensor.device)):
                yield tag, None if tensor is None else tensor.contiguous().cpu()
                continue
            if not staging.fits(tensor):
                yield from staging.turn()
            staging.add(tag, tensor)
        yield from staging.turn()
        yield from staging.turn()
    finally:
        staging.join()


class _Batch(Generic[Tag]):
    """One pinned buffer, and the tensors that are copied to it."""

    def __init__(self) -> None:
        self.entries: list[tuple[Tag, Tensor | None]] = []
        self.filled = 0
        self.marks: list[Mark] = []
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._sources: list[Tensor] = []  # to live until they are copied: see comm/streams.py, "whose memory"

    def room(self, source: Tensor, buffer_bytes: int) -> Tensor:
        """The next place in the buffer. A tensor that is larger than a buffer gets a larger one."""
        if source.nbytes > self._memory.numel() - self.filled:
            self._memory = pinned_bytes(max(aligned(source.nbytes), buffer_bytes))
        self._sources.append(source)
        place = view_as(self._memory[self.filled : self.filled + source.nbytes], source)
        self.filled += aligned(source.nbytes)
        return place

    def drain(self) -> Iterator[tuple[Tag, Tensor | None]]:
        for mark in self.marks:
            mark.wait_on_host()
        self._sources.clear()
        yield from self.entries
        self.entries, self.marks, self.filled = [], [], 0


class _Staging(Generic[Tag]):
    """Two batches: one is filled while the other is used."""

    def __init__(self, buffer_bytes: int) -> None:
        self._limit = buffer_bytes
        self._filling: _Batch[Tag] = _Batch()
        self._full: _Batch[Tag] = _Batch()
        self._streams: dict[torch.device, SideStream] = {}
        self._used: set[torch.device] = set()  # by the batch that is filled

    @property
    def is_empty(self) -> bool:
        return not self._filling.entries and not self._full.entries

    def fits(self, tensor: Tensor | None) -> bool:
        return tensor is None or not self._filling.filled or self._filling.filled + tensor.nbytes <= self._limit

    def add(self, tag: Tag, tensor: Tensor | None) -> None:
        batch = self._filling
        if tensor is None or not has_streams(tensor.device):
            tensor = tensor if tensor is None else tensor.contiguous().cpu()
            batch.filled += 0 if tensor is None else aligned(tensor.nbytes)  # what waits for its turn is bounded, too
            batch.entries.append((tag, tensor))
            return
        place = batch.room(tensor, self._limit)
        with self._stream_of(tensor.device).after_current():
            place.copy_(tensor, non_blocking=True)
        self._used.add(tensor.device)
        batch.entries.append((tag, place))

    def _stream_of(self, device: torch.device) -> SideStream:
        if device not in self._streams:
            self._streams[device] = copy_stream(device)
        return self._streams[device]

    def turn(self) -> Iterator[tuple[Tag, Tensor | None]]:
        """Let the batch that was filled be copied, and hand out the one before, whose buffer is filled next."""
        self._filling.marks = [self._streams[device].mark() for device in self._used]
        self._used.clear()
        self._filling, self._full = self._full, self._filling
        yield from self._filling.drain()

    def join(self) -> None:
        """What follows on the current stream comes after all copies. (Whoever stops half-way leaves some under way.)"""
        for stream in self._streams.values():
            stream.join()


class Uploads:
    """Fills tensors of devices from host memory: through one pinned buffer while the other is copied.

    The copies are on the current stream: what comes after them there finds them done.
    """

    def __init__(self, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._limit = buffer_bytes
        self._memory: list[Tensor | None] = [None, None]
        self._marks: list[list[Mark]] = [[], []]
        self._turn, self._filled = 0, 0
        self._used: set[torch.device] = set()  # by the buffer whose turn it is

    def room(self, count: int) -> Tensor:
        """So many bytes to write to, until ``send``: the next place in a buffer that is not copied from any more."""
        memory = self._memory[self._turn]
        if memory is None or self._filled + count > memory.numel():
            memory = self._next(count)
        place = memory[self._filled : self._filled + count]
        self._filled += aligned(count)
        return place

    def send(self, source: Tensor, target: Tensor) -> None:
        """Copy what was written to a place to where it belongs; also with another dtype."""
        target.copy_(source, non_blocking=has_streams(target.device))
        self._used.add(target.device)

    def _next(self, count: int) -> Tensor:
        self._marks[self._turn] = [mark_current(device) for device in self._used]
        self._used.clear()
        self._turn, self._filled = 1 - self._turn, 0
        for mark in self._marks[self._turn]:
            mark.wait_on_host()
        memory = self._memory[self._turn]
        if memory is None or memory.numel() < count:
            memory = self._memory[self._turn] = pinned_bytes(max(aligned(count), self._limit))
        return memory

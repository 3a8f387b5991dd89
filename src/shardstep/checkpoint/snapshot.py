"""The copy of the state in host memory that an asynchronous save writes, while training goes on.

Tensors of a device go to pinned memory on a stream beside the computation. The call that saves only enqueues the
copies; the thread that writes waits for each before it reads it.

[Note: who waits for the copies]
Nobody may change a tensor before it is copied, and the device sees to that, without a host that waits, and never for
the disk. Parameters, buffers, options (``lr`` may be a tensor) and ``extra`` can be changed by anybody, and buffers are
by forward (BatchNorm): they are copied first, and whatever training enqueues next waits for that (``hold_back``). The
state of a sharded optimizer is copied after them. It changes in a step, in ``load_state_dict``, and by whoever asks
for it, and these wait for its copies (``Progress.copies``); forward and backward run beside them. A step that was
captured in a graph is replayed without a word to us: then the state is held back as the rest is.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from shardstep.checkpoint.leaves import Leaf
from shardstep.comm.host_copies import BUFFER_BYTES, aligned, pinned_bytes, view_as
from shardstep.comm.streams import Mark, SideStream, copy_stream, has_streams
from shardstep.state.shards import StateShard


class _Strip(NamedTuple):
    """A range of host memory, up to what point of a stream it is written, and the tensors it is copied from."""

    stop: int  # address
    mark: Mark
    sources: list[Tensor]  # to live until they are copied: see comm/streams.py, "whose memory"


class Snapshot:
    """Copies of tensors on the host, some of them still under way."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, SideStream] = {}
        self._block, self._filled = torch.empty(0, dtype=torch.uint8), 0  # for small tensors, several in one
        self._strips: dict[int, _Strip] = {}  # by address
        self._starts: list[int] = []  # their addresses, in order, when all copies are enqueued
        self._of_leaves: list[Tensor] = []

    def copied(self, leaf: Any) -> Any:
        """A copy of a leaf of the tree on the host, which may be under way."""
        if isinstance(leaf, Leaf):
            return Leaf(self._copied_tree(leaf.value))
        if isinstance(leaf, StateShard):
            return StateShard(leaf.shape, leaf.boxes, self._copied(leaf.local), leaf.writes, leaf.blank)
        if isinstance(leaf, Tensor):
            return self._copied(leaf.detach())
        return copy.deepcopy(leaf)

    def _copied_tree(self, value: Any) -> Any:
        """A copy of plain data with tensors in it."""
        enqueued: dict[int, Any] = {}  # what deepcopy is to leave as it is

        def on_host(tensor: Tensor) -> Tensor:
            if not has_streams(tensor.device):
                return tensor.detach().cpu()
            host = self._copied(tensor.detach())
            enqueued[id(host)] = host
            return host

        here = tree_map_only(Tensor, on_host, value)
        self._of_leaves += enqueued.values()
        return copy.deepcopy(here, enqueued)

    def _copied(self, tensor: Tensor) -> Tensor:
        if not has_streams(tensor.device) or is_traceable_wrapper_subclass(tensor) or tensor.nbytes == 0:
            return tensor.to("cpu", copy=True)
        sources = [tensor]
        if not _is_dense(tensor):
            with self._stream_of(tensor.device).after_current():  # whose memory it is then: nobody else uses it
                tensor = tensor.contiguous()
            sources.append(tensor)
        memory = self._room(tensor.nbytes)
        self._enqueue(memory, tensor, sources)
        # In the order of its memory, which a copy keeps.
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def _room(self, count: int) -> Tensor:
        if count >= BUFFER_BYTES:
            return pinned_bytes(count)
        if self._filled + count > self._block.numel():
            self._block, self._filled = pinned_bytes(BUFFER_BYTES), 0
        place = self._block[self._filled : self._filled + count]
        self._filled += aligned(count)
        return place

    def _enqueue(self, memory: Tensor, tensor: Tensor, sources: Sequence[Tensor]) -> None:
        """Copy memory to memory, in strips, so that the first can be written while the last is copied."""
        elements = torch.as_strided(tensor, (tensor.numel(),), (1,))
        places = view_as(memory, elements)
        step = max(BUFFER_BYTES // tensor.itemsize, 1)
        stream = self._stream_of(tensor.device)
        with stream.after_current():
            for place, part in zip(places.split(step), elements.split(step), strict=True):
                place.copy_(part, non_blocking=True)
                self._strips[place.data_ptr()] = _Strip(place.data_ptr() + place.nbytes, stream.mark(), [*sources])

    def _stream_of(self, device: torch.device) -> SideStream:
        if device not in self._streams:
            self._streams[device] = copy_stream(device)
        return self._streams[device]

    @property
    def is_under_way(self) -> bool:
        """Whether there are copies that must be waited for."""
        return bool(self._strips)

    def hold_back(self) -> None:
        """The current stream goes on when all copies so far are made, and so does what training enqueues on it next."""
        for stream in self._streams.values():
            stream.join()

    def seal(self) -> list[Mark]:
        """Nothing else will be copied. Returns when all is."""
        self._starts = sorted(self._strips)
        return [stream.mark() for stream in self._streams.values()]

    def wait_for_all(self) -> None:
        """Wait, on the host, for everything: then it is no matter what becomes of the tensors."""
        for strip in self._strips.values():
            strip.mark.wait_on_host()
            strip.sources.clear()

    def wait_for_leaves(self) -> None:
        """Wait, on the host, for what is in leaves. They are read as a whole."""
        for tensor in self._of_leaves:
            self.wait_for(tensor)
        self._of_leaves.clear()

    def wait_for(self, tensor: Tensor) -> None:
        """Wait, on the host, until a copy, or the part of it that ``tensor`` is, is made."""
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        position = bisect.bisect_right(self._starts, start) - 1
        for address in self._starts[max(position, 0) :]:
            strip = self._strips[address]
            if address >= stop:
                return
            if strip.stop > start:
                strip.mark.wait_on_host()
                strip.sources.clear()


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a range of memory, in whatever order of dimensions."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()

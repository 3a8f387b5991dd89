"""Parts of buckets, reduced by the backend's own reduce-scatter on the gradients' device, in the order that it chooses.

[Note: which stream does what]
On an accelerator the host only enqueues. A part is packed on the stream that computes, so the memory of its gradients
is free for the rest of backward. The reduce stream waits for that; division, reduce-scatter, cast and addition into the
shard run there, and the computation goes on beside it. It waits for a reduction in two places: where gradients are read
(the step, clipping), and where it packs into the buffer of an earlier part, of which there are as many as parts may be
under way. That bounds the memory: this rank's share, these buffers, and what arrives of one part if its shard holds
gradients already, to which it is added.

[Note: one call per bucket]
Shares of one size are one reduce-scatter. Shares of different sizes are padded to one size if that is at most 5 % more;
else the backend takes a list of them, in one call.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from shardstep.comm import reductions
from shardstep.comm.collectives import Handle
from shardstep.comm.process_group import Group
from shardstep.comm.streams import Mark, SideStream, current_stream, has_streams, mark_current
from shardstep.grads.bucket_part import BucketPart
from shardstep.grads.division import Division, division
from shardstep.grads.reduce_scatter import ReduceScatter, Report, Sending, Source, Transport
from shardstep.grads.summation import Summation


class PackedBuffers:
    """The memory in which parts are packed, taken in turn: made at first use, and kept."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self._memory: list[Tensor | None] = [None] * count
        self._free = [Mark() for _ in range(count)]
        self._joined: list[list[Any]] = [[] for _ in range(count)]  # streams that are after that mark already
        self._turn = 0
        self.made_on: list[Any] = []  # streams, whose memory it is
        self.nbytes = 0  # of each; before the first is taken: as much as the largest part needs

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The next buffer, as soon as what was sent from it has left: the current stream waits for that."""
        turn = self._turn
        # To wait once more costs nothing, but the capture of a CUDA graph forbids to wait for what was before it.
        if not self._joined[turn] or current_stream(self._device) not in self._joined[turn]:
            self._free[turn].wait()
        memory = self._memory[turn]
        if memory is None:
            memory = self._memory[turn] = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
            self.made_on += [current_stream(self._device)] if has_streams(self._device) else []
        return memory[: numel * dtype.itemsize].view(dtype)

    def free_at(self, mark: Mark) -> None:
        """What was packed into the buffer that was taken has left it when ``mark`` is reached."""
        self._free[self._turn], self._joined[self._turn] = mark, []
        self._turn = (self._turn + 1) % len(self._memory)

    def joined(self, stream: Any) -> None:
        """``stream`` has waited for everything that was sent so far."""
        for streams in self._joined:
            if stream not in streams:
                streams.append(stream)

    def tensors(self) -> list[Tensor]:
        return [memory for memory in self._memory if memory is not None]


class Native(Transport):
    """All parts of one device."""

    reports = False

    def __init__(
        self, group: Group, report: Report, summation: Summation, device: torch.device, in_flight: int
    ) -> None:
        """Collective. ``in_flight``: how many parts may be under way."""
        # Streams that have not waited for what became of what they sent. The memory of the shards is theirs.
        self._senders: list[Any] = []
        super().__init__(group, report, summation)
        self.enqueues = has_streams(device)
        # Who is alone sends nothing: what is to be done with a part runs where it is packed.
        self._stream = SideStream(device if group.world_size > 1 else torch.device("cpu"))
        self._buffers = PackedBuffers(device, in_flight)
        self._joined: list[Any] = []  # streams that have waited for all that was sent
        self._device = device
        self._can = reductions.abilities_of(group, device)

    def expect(self, part: BucketPart) -> None:
        """This part will be sent, again and again."""
        self._buffers.nbytes = max(self._buffers.nbytes, self._packed_numel(part) * part.dtype.itemsize)

    def on_stream(self) -> AbstractContextManager[None]:
        return self._stream.current()

    def join(self) -> None:
        """The current stream goes on when everything that was sent has arrived, and is where it belongs."""
        if self.enqueues and (current := current_stream(self._device)) not in self._joined:
            self._stream.join()
            self._joined.append(current)
            self._buffers.joined(current)
            if current in self._senders:
                self._senders.remove(current)

    def hold_senders(self) -> None:
        """The shards go. Whose memory they are goes on when the current stream, which has read them, is here."""
        others = [stream for stream in self._senders if stream != current_stream(self._device)]
        self._senders.clear()
        if others:
            self.join()
            _hold(others, mark_current(self._device))

    def hold_all(self) -> None:
        """Everything goes, perhaps before anybody has waited for it: the same, and for the memory that is packed in."""
        concerned = dict.fromkeys([*self._senders, *self._buffers.made_on])
        if concerned:
            _hold(concerned, self._stream.mark())
            _hold([one for one in concerned if one != current_stream(self._device)], mark_current(self._device))

    def mark(self) -> Mark:
        """When everything that was sent so far has arrived."""
        return self._stream.mark()

    def buffers(self) -> list[Tensor]:
        """The memory in which parts are packed, as far as it was needed yet."""
        return self._buffers.tensors()

    # --- one part -------------------------------------------------------------------------------------------------

    def start(self, part: BucketPart, source: Source, own: Tensor, sending: Sending) -> ReduceScatter:
        assert not isinstance(source, ReduceScatter), "nothing is reported, so nothing is sent again"
        self._joined.clear()
        if self.enqueues and (current := current_stream(self._device)) not in self._senders:
            self._senders.append(current)
        if self._group.world_size == 1:
            part.pack(source, own, part.spans[0])
            return ReduceScatter(part, None, own, own, Handle(()), [own], still_divide=sending.divisor)
        share = part.equal_share
        averages = self._can.averages and (share is not None or self._can.takes_unequal)
        how = division(part.dtype, sending.divisor, self._group.world_size, averages)
        buffer = self._buffers.take(self._packed_numel(part), part.dtype)
        if share is None:
            part.pack(source, buffer)
        else:
            part.pack_evenly(source, buffer)
        with self._stream.after_current():
            if how.before != 1:
                buffer.mul_(1 / how.before)  # a power of two: exact, but for the smallest numbers
            handle, total = self._reduce(part, buffer, share, own, how)
            if self.enqueues:
                handle.wait()
                handle = Handle(())
        self._buffers.free_at(self._stream.mark())
        return ReduceScatter(part, None, buffer, own, handle, [total], still_divide=how.after)

    def _reduce(
        self, part: BucketPart, buffer: Tensor, share: int | None, own: Tensor, how: Division
    ) -> tuple[Handle, Tensor]:
        """Start the reduce-scatter: the handle, and where this rank's part of the sum will be."""
        if share is not None:
            out = _extended(own, share, part.dtype)
            return reductions.reduce_scatter(self._group, buffer, out, how.in_reduction), out[: own.numel()]
        out = _extended(own, own.numel(), part.dtype)
        shares = [buffer[low:high] for low, high in part.spans]
        if self._can.takes_unequal:
            return reductions.reduce_scatter_unequal(self._group, shares, out, how.in_reduction), out
        return reductions.reduce_each(self._group, shares, out), out

    def finish(self, scatter: ReduceScatter, divisor: int, out: Tensor) -> None:
        (total,) = scatter.received
        after = 1 if divisor == 1 or scatter.still_divide is None else scatter.still_divide
        if total.dtype != out.dtype:
            total = out.copy_(total)
        if after != 1:
            torch.div(total, after, out=out)
        elif total.data_ptr() != out.data_ptr():
            out.copy_(total)

    # --- sizes ----------------------------------------------------------------------------------------------------

    def share_numel(self, part: BucketPart) -> int:
        return part.equal_share or super().share_numel(part)

    def _packed_numel(self, part: BucketPart) -> int:
        share = part.equal_share
        return part.numel if share is None else share * self._group.world_size


def _hold(streams: Iterable[Any], mark: Mark) -> None:
    for stream in streams:
        mark.hold(stream)


def _extended(own: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """The memory of ``own`` and what follows it, as long as there is some; else other memory."""
    available = own.untyped_storage().nbytes() // own.itemsize - own.storage_offset()
    if own.dtype == dtype and available >= numel:
        return own.as_strided((numel,), (1,))
    return torch.empty(numel, dtype=dtype, device=own.device)

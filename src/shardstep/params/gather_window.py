"""The gathers of one step under way: started one after the other, finished in the same order, few at once.

[Note: gathers on a stream]
On an accelerator a bucket is packed, gathered and unpacked on a gather stream, behind the update on the stream that
steps; that one goes on with the next bucket and waits for the gather stream once, at the end of the step, or (lazily)
when somebody touches a parameter. The host only enqueues. A bucket is unpacked behind the next one's packing, so that
the next is on its way meanwhile, and no more than two are staged at once. Staging memory is made, used and given back
in the order of the gather stream, which waits for the collective in between: the allocator hands out the same two
buffers again and again.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from shardstep.comm.consensus import RankConsensus, RankFailed
from shardstep.comm.host_channel import SharedMessages
from shardstep.comm.phases import phase
from shardstep.comm.streams import Mark, current_stream
from shardstep.params.all_gather import AllGatherHandle, BucketAllGather
from shardstep.params.progress import Progress
from shardstep.params.sharded_parameters import MAX_IN_FLIGHT, ShardedParameters


class GatherFailed(RuntimeError):
    """The parameters could not be gathered. What the ranks have sent each other since is unknown: nothing goes on."""


@dataclass
class _UnderWay:
    """An all-gather that was started."""

    position: int  # of the bucket
    number: int  # counted over all steps, alike on every rank
    gather: BucketAllGather
    handle: AllGatherHandle | None  # None: all is enqueued, to the end
    has_arrived: bool = False
    stepped_on: Any = None  # on an accelerator: the stream of the step
    unpacked: Mark = field(default_factory=Mark)  # on an accelerator: when it is in its place

    def hold_stepping_stream(self) -> None:
        """The stream of the step goes on when the bucket is in its place."""
        if self.stepped_on is not None:
            self.unpacked.hold(self.stepped_on)


class GatherWindow:
    """What of one step is under way."""

    def __init__(self, sharded: ShardedParameters, consensus: RankConsensus, progress: Progress) -> None:
        self._sharded = sharded
        self._consensus = consensus
        self._progress = progress  # hears of every failure, also of those that another error hides
        self._in_flight: deque[_UnderWay] = deque()
        self._packed: dict[torch.device, _UnderWay] = {}  # the last one on each gather stream, not unpacked yet
        self._has_reported = False  # that the step failed here
        self._absence: RankFailed | None = None  # why a rank does not come to what is under way

    def __del__(self) -> None:
        """Nobody has waited, and the parameters go with it: their memory is free when the gather stream is done."""
        for one in () if sys.is_finalizing() else self._in_flight:
            one.hold_stepping_stream()

    @property
    def in_flight(self) -> list[int]:
        """The buckets under way, in the order in which they were started."""
        return [one.position for one in tuple(self._in_flight)]  # which nobody changes meanwhile: see finish_oldest

    def start(self, position: int) -> None:
        """Start the gather of a bucket. All ranks start them in the same order."""
        for gather in self._sharded.plan.gathers[position]:
            self._start(position, gather)

    def _start(self, position: int, gather: BucketAllGather) -> None:
        if gather.on_stream:
            self._enqueue(position, gather)
            return
        # (A ring that a failed step left full says so when a slot is taken.)
        while self._in_flight and (len(self._in_flight) >= MAX_IN_FLIGHT or gather.must_wait):
            self.finish_oldest()
        with phase("shardstep::gather"):
            number = self._progress.gathers_started + 1
            try:
                self._in_flight.append(_UnderWay(position, number, gather, gather.start()))
            except RuntimeError as error:
                raise self._failed(error) from error
            self._progress.gathers_started = number  # what fails to start, the others wait for in vain

    def _enqueue(self, position: int, gather: BucketAllGather) -> None:
        """Start a gather on its gather stream, and unpack the one before it. See [Note: gathers on a stream]."""
        stepping, previous = current_stream(gather.device), self._packed.get(gather.device)
        number = self._progress.gathers_started + 1
        with phase("shardstep::gather"), self._sharded.gather_streams.of(gather.device).after_current():
            try:
                one = _UnderWay(position, number, gather, gather.start(), stepped_on=stepping)
                self._progress.gathers_started = number
                self._in_flight.append(one)
                self._packed[gather.device] = one
                if previous is not None:
                    self._unpack(previous)
            except RuntimeError as error:
                raise self._failed(error) from error

    def _unpack(self, one: _UnderWay) -> None:
        """On the gather stream: when it is there, put it where it belongs."""
        if one.handle is not None:
            one.handle.under_way.wait()
            one.gather.unpack(one.handle)
            one.handle = None
            one.unpacked = self._sharded.gather_streams.of(one.gather.device).mark()

    def _enqueue_rest(self) -> None:
        """Have every bucket on a gather stream unpacked: nothing is left to do for the host."""
        while self._packed:
            device, one = self._packed.popitem()
            with phase("shardstep::gather"), self._sharded.gather_streams.of(device).current():
                try:
                    self._unpack(one)
                except RuntimeError as error:
                    raise self._failed(error) from error

    def finish(self) -> None:
        """Bring all ranks' parameters up to date with what was started."""
        self._enqueue_rest()
        last: dict[torch.device, _UnderWay] = {}
        while self._in_flight:
            if self._in_flight[0].gather.on_stream:
                one = self._in_flight.popleft()
                last[one.gather.device] = one
            else:
                self.finish_oldest()
        for one in last.values():
            one.unpacked.wait()

    def finish_oldest(self) -> None:
        """Wait for the bucket that was started first, and put it where it belongs.

        With lazy gathers a signal handler may touch a parameter and come here while its thread is here already. So it
        is under way until all is done, and what must be done once is noted.
        """
        under_way = tuple(self._in_flight)
        if not under_way:
            return
        one = under_way[0]
        if one.gather.on_stream:
            self._enqueue_rest()
            one.unpacked.wait()
            one.hold_stepping_stream()  # what follows on it takes the parameters for ordinary ones, too
            self._is_over(one)
            return
        assert one.handle is not None
        with phase("shardstep::gather"):
            try:
                one.handle = one.gather.relay(one.handle)
                self._wait_for(one, one.handle)
                if not one.has_arrived:
                    one.has_arrived = True
                    one.gather.arrived(one.handle)
                one.gather.unpack(one.handle)
            except RuntimeError as error:
                self._in_flight.popleft()
                raise self._failed(error) from error
        self._is_over(one)

    def _is_over(self, one: _UnderWay) -> None:
        if self._in_flight and self._in_flight[0] is one:
            self._in_flight.popleft()

    def _wait_for(self, one: _UnderWay, handle: AllGatherHandle) -> None:
        """Wait for all ranks. Who waits long looks whether one has left the step before it came here: it never will.

        (Messages through gloo cannot be waited for in parts. There the process group's time-out ends it.)
        """

        def look() -> None:
            siblings = self._sharded.ranks.siblings
            self._absence = self._consensus.failure_before(one.number, siblings, self._has_reported)
            if self._absence is not None:
                raise self._absence

        if not isinstance(handle.under_way, SharedMessages):
            handle.under_way.wait()
        elif self._absence is None:
            handle.under_way.wait(look)
        else:
            raise self._absence

    def relay(self) -> None:
        """Hand on to the ranks of this host what others send it. What is then left to do needs no other rank's help."""
        self._enqueue_rest()
        with phase("shardstep::gather"):
            try:
                for one in tuple(self._in_flight):
                    if one.handle is not None:
                        one.handle = one.gather.relay(one.handle)
            except RuntimeError as error:
                raise self._failed(error) from error

    def drain(self, has_reported: bool = False) -> None:
        """After an error: wait for what is under way, so that nothing is written into memory that others have later.

        If all ranks failed at the same place, their parameters agree afterwards. A rank that has come further than
        another finds out here, by a gather that fails. ``has_reported``: the others know of the error.
        """
        self._has_reported = has_reported
        while self._in_flight:
            try:
                self.finish_oldest()
            except RuntimeError:  # the error that brought us here is the one to tell
                self._in_flight.clear()

    def _failed(self, error: RuntimeError) -> GatherFailed:
        where = ""
        if not isinstance(error, RankFailed):
            where = self._consensus.meanwhile("the gather of a step", among=self._sharded.ranks.siblings)
        remedy = " Call it on every rank, in the same order." if where else ""
        failure = GatherFailed(f"step: the parameters could not be gathered: {str(error).rstrip('.')}.{where}{remedy}")
        self._progress.break_off(str(failure))
        return failure

"""The gathers of one step under way: started one after the other, finished in the same order, few at once."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from shardstep.comm.consensus import RankConsensus
from shardstep.comm.phases import phase
from shardstep.params.all_gather import AllGatherHandle, BucketAllGather
from shardstep.params.progress import Progress
from shardstep.params.sharded_parameters import MAX_IN_FLIGHT, ShardedParameters


class GatherFailed(RuntimeError):
    """The parameters could not be gathered. What the ranks have sent each other since is unknown: nothing goes on."""


@dataclass
class _UnderWay:
    """An all-gather that was started."""

    position: int  # of the bucket
    gather: BucketAllGather
    handle: AllGatherHandle
    has_arrived: bool = False


class GatherWindow:
    """What of one step is under way."""

    def __init__(self, sharded: ShardedParameters, consensus: RankConsensus, progress: Progress) -> None:
        self._sharded = sharded
        self._consensus = consensus
        self._progress = progress  # hears of every failure, also of those that another error hides
        self._in_flight: deque[_UnderWay] = deque()

    @property
    def in_flight(self) -> list[int]:
        """The buckets under way, in the order in which they were started."""
        return [one.position for one in self._in_flight]

    def start(self, position: int) -> None:
        """Start the gather of a bucket. All ranks start them in the same order."""
        for gather in self._sharded.plan.gathers[position]:
            self._start(position, gather)

    def _start(self, position: int, gather: BucketAllGather) -> None:
        # (A ring that a failed step left full says so when a slot is taken.)
        while self._in_flight and (len(self._in_flight) >= MAX_IN_FLIGHT or gather.must_wait):
            self.finish_oldest()
        with phase("shardstep::gather"):
            self._progress.gathers_started += 1
            try:
                self._in_flight.append(_UnderWay(position, gather, gather.start()))
            except RuntimeError as error:
                raise self._failed(error) from error

    def finish(self) -> None:
        """Bring all ranks' parameters up to date with what was started."""
        while self._in_flight:
            self.finish_oldest()

    def finish_oldest(self) -> None:
        """Wait for the bucket that was started first, and put it where it belongs.

        With lazy gathers a signal handler may touch a parameter and come here while its thread is here already. So it
        is under way until all is done, and what must be done once is noted.
        """
        one = self._in_flight[0]
        with phase("shardstep::gather"):
            try:
                one.handle = one.gather.relay(one.handle)
                one.handle.under_way.wait()
                if not one.has_arrived:
                    one.has_arrived = True
                    one.gather.arrived(one.handle)
                one.gather.unpack(one.handle)
            except RuntimeError as error:
                self._in_flight.popleft()
                raise self._failed(error) from error
        if self._in_flight and self._in_flight[0] is one:
            self._in_flight.popleft()

    def relay(self) -> None:
        """Hand on to the ranks of this host what others send it. What is then left to do needs no other rank's help."""
        with phase("shardstep::gather"):
            try:
                for one in self._in_flight:
                    one.handle = one.gather.relay(one.handle)
            except RuntimeError as error:
                raise self._failed(error) from error

    def drain(self) -> None:
        """After an error: wait for what is under way, so that nothing is written into memory that others have later.

        If all ranks failed at the same place, their parameters agree afterwards.
        """
        while self._in_flight:
            try:
                self.finish_oldest()
            except RuntimeError:  # the error that brought us here is the one to tell
                self._in_flight.clear()

    def _failed(self, error: RuntimeError) -> GatherFailed:
        where = self._consensus.meanwhile("the gather of a step", among=self._sharded.ranks.siblings)
        remedy = " Call it on every rank, in the same order." if where else ""
        failure = GatherFailed(f"step: the parameters could not be gathered: {str(error).rstrip('.')}.{where}{remedy}")
        self._progress.break_off(str(failure))
        return failure

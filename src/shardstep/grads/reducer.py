"""Buckets of gradients under way: sent in one order on all ranks, few at a time, brought in in the same order.

With each bucket a rank reports which iteration and bucket it is of, and for which parameters it has a gradient: one
that nobody has used is left alone by the step, one that only some have used gets the mean with zeros, as in DDP.

[Note: iterations that were aborted]
A rank may abort an iteration (``zero_grad`` without a step) after it has sent some of its buckets, all, or none, and
the others then do too, but they have sent other numbers. Reduce-scatters meet in the order in which they were sent, so
those of the next iteration may meet old ones. What all ranks have reported is known to all, so all draw the same
conclusions:

- all reported the same iteration and bucket: it is reduced. (A rank that has aborted it since throws the result away.)
- a rank reported a later iteration than mine: mine was aborted, there or here. I throw it away.
- else mine is current and another one is old: I send it again, one at a time, until it is met. The others do as I do:
  whoever has sent fewer buckets meets old ones of mine and sends again, until the same ones meet.

On a mesh all of its ranks report to each other; what they have met is then summed across the replicas as well.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager

import torch
from torch import Tensor

from shardstep.comm.consensus import RankConsensus
from shardstep.comm.phases import phase
from shardstep.comm.process_group import Group, open_side_group
from shardstep.comm.streams import Mark
from shardstep.grads import reports
from shardstep.grads.across_replicas import AcrossReplicas
from shardstep.grads.bucket_part import BucketPart
from shardstep.grads.iteration import InFlight, Iteration, IterationState, Leaving
from shardstep.grads.native import Native
from shardstep.grads.reduce_scatter import ReduceScatter, Sending, Transport
from shardstep.grads.settings import ReduceSettings
from shardstep.grads.shards import GradientShards
from shardstep.grads.summation import sum_dtype
from shardstep.grads.transports import ReduceTransports
from shardstep.grads.used_parameters import UsedParameters
from shardstep.params.sharded_parameters import ShardedParameters


class ReduceFailed(RuntimeError):
    """The gradients could not be reduced. What the ranks have sent each other since is unknown: nothing goes on."""


class GradientReducer:
    """Sends buckets of gradients and brings them in."""

    def __init__(
        self,
        sharded: ShardedParameters,
        shards: GradientShards,
        group: Group,
        consensus: RankConsensus,
        settings: ReduceSettings,
    ) -> None:
        """Collective on a mesh: reports and sums across the replicas have process groups of their own."""
        self._sharded = sharded
        self._shards = shards
        self._group = group  # reductions have a process group of their own, see docs/design.md
        replicate = sharded.ranks.replicate
        self._replicate = open_side_group(replicate) if replicate is not None else None
        self._reporting = open_side_group(sharded.ranks.everyone) if replicate is not None else group
        self._consensus = consensus
        self._transports = ReduceTransports(sharded, group, self._reporting, settings)
        self.used = UsedParameters(sharded, shards, self._transports, self._reporting, settings.find_unused)
        self._arrivals: dict[int, Mark] = {}  # on accelerators, by bucket: when it is in the shard
        self._in_flight: deque[InFlight] = deque()
        self._unmet: list[ReduceScatter] = []  # thrown away, and never met over sockets: their memory must stay
        self._held: list[Tensor] = []  # memory of shards that were given up
        self._failure = ""
        self.sent = 0  # so far
        self.iteration = Iteration(0)

    def __del__(self) -> None:
        """Nobody has waited, and shards and buffers go with it: their memory is free when the reductions are over."""
        if "_transports" in vars(self) and not sys.is_finalizing():
            self._transports.hold_all()

    def extend(self) -> None:
        """Take over the buckets that were added. Collective."""
        self.join()
        self._transports.extend(self._shards.buckets)

    @property
    def parts(self) -> list[list[BucketPart]]:
        """By bucket: the parts in which it travels."""
        return self._transports.parts

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way, of use or not."""
        return bool(self._in_flight)

    @property
    def under_way(self) -> int:
        """How many buckets of use were sent, and not brought in yet."""
        return len(self.iteration.resend) + sum(not sent.is_over for sent in self._in_flight)

    @property
    def reports(self) -> bool:
        """Whether ranks report with every bucket what it is."""
        return self._transports.reports

    def tensors(self) -> list[Tensor]:
        """The memory of what was not sent yet, and of what is under way."""
        all_sent = [*self._in_flight, *self.iteration.resend]
        under_way = [tensor for sent in all_sent for tensor in sent.scatter.tensors()]
        under_way += [sent.scatter.own for sent in all_sent if sent.kept]  # else it is the shard's memory, see _room
        under_way += [tensor for sent in all_sent if sent.across is not None for tensor in sent.across.tensors()]
        return [*self.iteration.arrived.values(), *under_way]

    def buffers(self) -> list[Tensor]:
        """The memory in which parts are packed on accelerators, which is kept."""
        return self._transports.buffers()

    # --- iterations -----------------------------------------------------------------------------------------------

    def start_iteration(self, iteration: Iteration) -> None:
        """A new iteration begins: what is under way belongs to an earlier one."""
        self.discard()
        self.iteration.become(IterationState.ABORTED)
        self.iteration = iteration

    def discard(self) -> None:
        """Nothing that is under way, or was to be sent again, is of use any more."""
        for sent in self.iteration.resend:
            self._keep_memory(sent.scatter)
        self.iteration.resend.clear()
        self.iteration.misses = 0
        for sent in self._in_flight:
            sent.superseded = True
        self.used.forget()

    def _keep_memory(self, scatter: ReduceScatter) -> None:
        """Nobody will meet this one. What was to be sent or received over sockets keeps its memory."""
        if scatter.data.works:
            self._unmet.append(scatter)

    # --- sending --------------------------------------------------------------------------------------------------

    def make_room(self, part: BucketPart, patience: float | None) -> bool:
        """Bring in what must be before this part can be sent. False if that did not come in time."""
        # (A ring that is full without anything in flight says so when a slot is taken.)
        while (self._in_flight or self.iteration.resend) and (self._is_full or self._has_under_way(part)):
            if not self._bring_in_one(patience):
                return False
        return True

    @property
    def _is_full(self) -> bool:
        is_full = len(self._in_flight) >= self._transports.in_flight or self._transports.is_full
        return bool(self.iteration.resend) or is_full

    def _has_under_way(self, part: BucketPart) -> bool:
        """Whether the same bucket, of an earlier round, has to come first: this one may be added to it."""
        return part.number == 0 and any(
            sent.part.bucket is part.bucket and not sent.is_over for sent in self._in_flight
        )

    def send(self, part: BucketPart, leaving: Leaving, divisor: int) -> None:
        """Send a part of a bucket for which there is room."""
        self._send(part, leaving.gradients, leaving.kept, self.used.here(part, leaving), divisor, leaving.excused)

    def send_for_nothing(self, part: BucketPart) -> None:
        """Send zeros that other ranks have met, or will, and throw away what arrives."""
        zeros = Leaving([None] * len(part.bucket.params), set())
        divisor = self._sharded.ranks.everyone.world_size  # the others ask for a mean, too
        self._send(part, zeros.gradients, zeros.kept, self.used.here(part, zeros), divisor, of_use=False)

    def _send(
        self,
        part: BucketPart,
        source: Sequence[Tensor | None] | ReduceScatter,
        kept: set[int],
        here: list[bool] | None,
        divisor: int,
        excused: Set[int] | None = frozenset(),
        of_use: bool = True,
    ) -> None:
        self.check()
        self.sent += 1
        tag, transport = self._tag(part), self._transports.of(part)
        with phase("shardstep::reduce"), self._failing():
            own = source.own if isinstance(source, ReduceScatter) else self._room(part, kept, of_use)
            scatter = transport.start(part, source, own, Sending(self._report(part, kept, here), tag, divisor))
            sent = InFlight(scatter, kept, here, divisor, self.iteration, self.iteration.number, tag)
            sent.superseded, sent.excused = not of_use, excused
            self._in_flight.append(sent)
            if transport.enqueues:
                self._launch(sent, transport)
            self._exchange_what_met()

    def _launch(self, sent: InFlight, transport: Transport) -> None:
        """On an accelerator: all that is to be done with what arrives, in stream order."""
        assert isinstance(transport, Native)
        sent.is_exchanged = True
        with transport.on_stream():
            self._receive(sent, None)
            if not sent.is_over:
                self._put(sent, transport)
        sent.is_put, self._arrivals[sent.part.bucket.position] = True, transport.mark()
        # The memory is the reduce stream's: the next part may have it, however many are counted as under way.
        sent.scatter, sent.across = sent.scatter.without_memory(), None

    def _room(self, part: BucketPart, kept: set[int], of_use: bool) -> Tensor:
        """Memory for this rank's share of a part: of its shard, unless that holds gradients to which it is added."""
        shard = self._shards.buckets[part.bucket.position]
        transport = self._transports.of(part)
        low, high = transport.mine(part)
        if of_use and not (kept and shard.shard is not None):
            return shard.room(low, high)
        with transport.on_stream():  # where alone it is used
            return torch.empty(transport.share_numel(part), dtype=shard.dtype, device=shard.device)[: high - low]

    def _exchange_what_met(self) -> None:
        """Start what could not be started before all ranks were known to be in the same bucket."""
        for sent in self._in_flight:
            if sent.scatter.reports is not None and not sent.scatter.reports.is_done:
                return  # all ranks exchange in the same order
            self._exchange(sent)

    def _exchange(self, sent: InFlight) -> None:
        if sent.scatter.reports is not None:
            sent.scatter.reports.wait()
        if not sent.is_exchanged and _is_met(sent):
            sent.scatter = self._transports.of(sent.part).exchange(sent.scatter)
            sent.is_exchanged = True

    def _report(self, part: BucketPart, kept: set[int], here: list[bool] | None) -> bytes:
        indices, present = part.bucket.params, here
        if here is not None:  # a rank that holds an earlier gradient says so, too: one that has joined may not know
            present = [one or index in kept for one, index in zip(here, indices, strict=True)]
        return reports.report(self.iteration.number, self._transports.number_of[part], present, len(indices))

    def _tag(self, part: BucketPart) -> int:
        """Over sockets only the same parts of the same iteration meet."""
        bits = len(self._transports.number_of).bit_length()
        return 1 + self.iteration.number % 2 ** (29 - bits) * 2**bits + self._transports.number_of[part]

    # --- bringing in ----------------------------------------------------------------------------------------------

    def bring_in(self, patience: float | None) -> bool:
        """Bring in everything of use. False if it did not come in time; None waits as long as the group does."""
        while self.iteration.resend or any(not sent.is_over for sent in self._in_flight):
            if not self._bring_in_one(patience):
                return False
        return True

    def drain(self) -> None:
        """Wait for everything, also what is of no use any more. The other ranks must have sent as much."""
        while self._in_flight:
            self._bring_in_one(None)

    def _bring_in_one(self, patience: float | None) -> bool:
        """Finish the oldest part, after sending one again if that is all there is to do. False: not in time."""
        self.check()
        if not self._in_flight:
            again = self.iteration.resend.popleft()
            self._send(again.part, again.scatter, again.kept, again.here, again.divisor, again.excused)
        sent = self._in_flight[0]
        with phase("shardstep::reduce"), self._failing():
            heard = sent.scatter.reports
            if patience is not None and heard is not None and not heard.wait_for(patience):
                return False
            self._exchange(sent)
            self._exchange_what_met()
            if sent.is_exchanged and not sent.is_put and not self._receive(sent, patience):
                return False
            self._in_flight.popleft()
            self._transports.release()
            if not sent.is_exchanged:
                self._draw_conclusions(sent)
            elif not sent.is_over:
                self._add(sent)
        return True

    def _receive(self, sent: InFlight, patience: float | None) -> bool:
        """Wait for the data of a bucket that was met. On a mesh also across the replicas: False, if not in time.

        Also if it is of no use here any more: ranks of other replicas wait for this one's part.
        """
        if sent.across is None:
            transport = self._transports.of(sent.part)
            limited = patience is not None and transport.can_wait_again
            if limited and not sent.scatter.data.wait_for(patience):
                return False
            sent.scatter.data.wait()
            if self._replicate is None:
                return True
            low, high = transport.mine(sent.part)
            device = self._shards.buckets[sent.part.bucket.position].device
            total = torch.empty(high - low, dtype=sum_dtype(sent.part.dtype), device=device)
            transport.finish(sent.scatter, 1, total)
            divisor = sent.divisor if sent.scatter.still_divide is None else sent.scatter.still_divide
            sent.across = AcrossReplicas(self._replicate, total, divisor, sent.part.dtype)
        return sent.across.advance(patience)

    def _add(self, sent: InFlight) -> None:
        """Add what arrived to this rank's shard, and note which parameters have a gradient there."""
        self.iteration.misses, self.iteration.behind = 0, []
        transport = self._transports.of(sent.part)
        if not sent.is_put:
            self._put(sent, transport)
        shard = self._shards.buckets[sent.part.bucket.position]
        present = self.used.anywhere(sent)
        shard.holding = sent.kept | present
        for index in present if sent.here is not None else ():  # used elsewhere, perhaps not here
            self._expose(index)

    def _put(self, sent: InFlight, transport: Transport) -> None:
        shard = self._shards.buckets[sent.part.bucket.position]
        low, high = transport.mine(sent.part)
        if sent.kept and shard.shard is not None:
            self._finish(sent, transport, sent.scatter.own)
            shard.add(low, high, sent.scatter.own, sent.kept)
        else:
            self._finish(sent, transport, shard.room(low, high))

    def _expose(self, index: int) -> None:
        if index not in self.iteration.arrived and self._sharded.params[index].grad is None:
            self._shards.expose(index)

    def _finish(self, sent: InFlight, transport: Transport, out: Tensor) -> None:
        """Put the mean of what arrived into ``out``."""
        if sent.across is not None:
            out.copy_(sent.across.mean)
        else:
            transport.finish(sent.scatter, sent.divisor, out)

    def _draw_conclusions(self, sent: InFlight) -> None:
        """The ranks were not in the same bucket. See the note above."""
        heard = sent.scatter.reports
        if sent.is_over or heard is None:
            self._keep_memory(sent.scatter)
            return
        ahead = reports.distances(heard.messages, sent.number)
        if any(0 < distance <= reports.NUMBERS // 2 for distance in ahead):
            self._keep_memory(sent.scatter)
            self.discard()
            self.iteration.become(IterationState.LOST)
            return
        self.iteration.behind = [rank for rank, distance in enumerate(ahead) if distance]
        self.iteration.misses = 0 if any(ahead) else self.iteration.misses + 1
        if self.iteration.misses > 4 * self._transports.in_flight + 8:
            self._failure = f"the ranks reduce different buckets: {reports.parts(heard.messages)}, by rank"
            self.check()
        self._send_again([sent, *(other for other in self._in_flight if not other.is_over)])

    def _send_again(self, unmet: list[InFlight]) -> None:
        for sent in unmet:
            sent.superseded = True
            if sent.scatter.slot is not None:  # of shared memory, which other parts will be packed into
                sent.scatter = sent.scatter._replace(packed=sent.scatter.packed.clone())
        self.iteration.resend = deque(unmet + list(self.iteration.resend))

    # --- reading ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Everything was brought in, and is about to be read: the current stream waits for it.

        The host waits only for the ranks to tell what they have used, if the user has asked for that.
        """
        self.join()
        for index in self.used.settle():
            self._expose(index)

    def wait_for(self, position: int) -> None:
        """The current stream goes on when this bucket, which was brought in, is in its shard."""
        if position in self._arrivals:
            self._arrivals[position].wait()

    def join(self) -> None:
        """The current stream goes on when everything that was sent is where it belongs. The host does not wait."""
        self._transports.join()
        if self._held:
            self._transports.hold_senders()
            self._held.clear()

    def give_back(self) -> None:
        """The shards were read, on the current stream, and go: so that their memory may be used for something else."""
        self.join()
        self._transports.hold_senders()

    def hold(self, shards: list[Tensor]) -> None:
        """Keep memory of shards until ``join``: something may be under way to it.

        After an abort that may never arrive if the other ranks are not told, so the computation must not wait for it.
        """
        if not self.reports:
            self._held += shards

    # --- failing --------------------------------------------------------------------------------------------------

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """What goes wrong on the way is the end: say where the other ranks are."""
        try:
            yield
        except ReduceFailed:
            raise
        except RuntimeError as error:
            raise self._failed(error) from error

    def _failed(self, error: RuntimeError) -> ReduceFailed:
        where = self._consensus.meanwhile("the reduction of gradients")
        self._failure = f"{str(error).rstrip('.')}.{where}"
        if self.iteration.behind:
            self._failure += (
                f" Ranks {self.iteration.behind} were in an earlier iteration: those are counted by zero_grad, which "
                "every rank must call equally often."
            )
        return ReduceFailed(f"backward: the gradients could not be reduced: {self._failure}")

    def check(self) -> None:
        """ReduceFailed if an earlier reduction failed."""
        if self._failure:
            raise ReduceFailed(
                f"the gradients could not be reduced ({self._failure}), so what the ranks have sent each other is "
                "unknown. Start the processes again, from a checkpoint."
            )


def _is_met(sent: InFlight) -> bool:
    """Whether all ranks have reported the same iteration and bucket. The same answer on every rank."""
    heard = sent.scatter.reports
    return heard is None or reports.are_about_the_same(heard.messages)

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

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from shardstep.comm import collectives
from shardstep.comm.consensus import RankConsensus
from shardstep.comm.process_group import Group, open_side_group
from shardstep.comm.shared_memory import SharedMemoryRing, open_ring
from shardstep.grads.across_replicas import AcrossReplicas
from shardstep.grads.iteration import InFlight, Iteration, IterationState
from shardstep.grads.reduce_scatter import BucketReduceScatter, ReduceScatter, slot_bytes
from shardstep.grads.settings import ReduceSettings
from shardstep.grads.shards import BucketShard, GradientShards
from shardstep.params.sharded_parameters import ShardedParameters

_NUMBERS = 251  # iterations and buckets are reported by a byte


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
        self._settings = settings
        self._scatters: list[BucketReduceScatter] = []  # by bucket
        self._header_bytes = 0  # of all buckets alike
        self._ring: SharedMemoryRing | None = None
        self._in_flight: deque[InFlight] = deque()
        self._unmet: list[ReduceScatter] = []  # thrown away, and never met over sockets: their memory must stay
        self._failure = ""
        self.sent = 0  # so far
        self.iteration = Iteration(0)

    def extend(self) -> None:
        """Take over the buckets that were added. Collective."""
        self._open_ring()
        self._scatters = [
            BucketReduceScatter(
                shard.bucket, self._sharded.params, self._group, self._settings.reduce_dtype, self._reporting
            )
            for shard in self._shards.buckets
        ]
        self._header_bytes = 2 + max((len(shard.bucket.params) for shard in self._shards.buckets), default=0)

    def _open_ring(self) -> None:
        params = self._sharded.params.values()
        if self._group.world_size == 1 or not all(collectives.sends_pairwise(self._group, p.device) for p in params):
            return
        buckets = [shard for shard in self._shards.buckets if self._sharded.is_small(shard.bucket)]
        if not buckets:
            return
        size = max(slot_bytes(shard.bucket.numel, shard.dtype, self._group) for shard in buckets)
        # More slots than buckets would stay unused. A smaller ring is no mistake: ``make_room`` asks it.
        count = min(self._settings.in_flight, len(self._shards.buckets))
        if self._ring is None or self._ring.slot_bytes < size or self._ring.in_flight < count:
            self._ring = open_ring(self._group, count, size)

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way, of use or not."""
        return bool(self._in_flight)

    @property
    def reports(self) -> bool:
        """Whether ranks report with every bucket what it is."""
        return all(scatter.reports for scatter in self._scatters)

    def tensors(self) -> list[Tensor]:
        """The memory of what was not sent yet, and of what is under way."""
        all_sent = [*self._in_flight, *self.iteration.resend]
        under_way = [tensor for sent in all_sent for tensor in (sent.scatter.packed, *sent.scatter.parts)]
        under_way += [tensor for sent in all_sent if sent.across is not None for tensor in sent.across.tensors()]
        return [*self.iteration.arrived.values(), *under_way]

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

    def _keep_memory(self, scatter: ReduceScatter) -> None:
        """Nobody will meet this one. What was to be sent or received over sockets keeps its memory."""
        if scatter.data.works:
            self._unmet.append(scatter)

    # --- sending --------------------------------------------------------------------------------------------------

    def make_room(self, position: int, patience: float | None) -> bool:
        """Bring in what must be before this bucket can be sent. False if that did not come in time."""
        # (A ring that is full without anything in flight says so when a slot is taken.)
        while (self._in_flight or self.iteration.resend) and (self._is_full or self._has_under_way(position)):
            if not self._bring_in_one(patience):
                return False
        return True

    @property
    def _is_full(self) -> bool:
        ring_is_full = self._ring is not None and self._ring.is_full
        return bool(self.iteration.resend) or len(self._in_flight) >= self._settings.in_flight or ring_is_full

    def _has_under_way(self, position: int) -> bool:
        """Whether the same bucket, of an earlier round, has to come first: this one may be added to it."""
        return any(sent.shard.bucket.position == position and not sent.is_over for sent in self._in_flight)

    def send(self, position: int, gradients: Sequence[Tensor | None], kept: set[int], divisor: int) -> None:
        """Send a bucket for which there is room. ``gradients`` are in its order."""
        here = [gradient is not None for gradient in gradients]
        self._send(self._shards.buckets[position], gradients, kept, None if all(here) else here, divisor)

    def _send(
        self,
        shard: BucketShard,
        source: Sequence[Tensor | None] | ReduceScatter,
        kept: set[int],
        here: list[bool] | None,
        divisor: int,
    ) -> None:
        self.check()
        self.sent += 1
        with record_function("shardstep::reduce"):
            try:
                slot = self._ring.take() if self._ring is not None else None
                header = self._header(shard, kept, here)
                scatter = self._scatters[shard.bucket.position].start(source, header, slot, self._tag(shard))
            except RuntimeError as error:
                raise self._failed(error) from error
        self._in_flight.append(InFlight(shard, scatter, kept, here, divisor, self.iteration, self.iteration.number))

    def _header(self, shard: BucketShard, kept: set[int], here: list[bool] | None) -> Tensor:
        """What is reported with a bucket: iteration, bucket, a byte per parameter."""
        header = torch.ones(self._header_bytes, dtype=torch.uint8)
        header[0], header[1] = self.iteration.number % _NUMBERS, shard.bucket.position % _NUMBERS
        if here is not None:  # a rank that holds an earlier gradient says so, too: one that has joined may not know
            flags = [one or index in kept for one, index in zip(here, shard.bucket.params, strict=True)]
            header[2 : 2 + len(flags)] = torch.tensor(flags)
        return header

    def _tag(self, shard: BucketShard) -> int:
        """Over sockets only buckets of the same iteration and position meet."""
        bits = len(self._shards.buckets).bit_length()
        return 1 + self.iteration.number % 2 ** (29 - bits) * 2**bits + shard.bucket.position

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
        """Finish the oldest bucket, after sending one again if that is all there is to do. False: not in time."""
        self.check()
        if not self._in_flight:
            again = self.iteration.resend.popleft()
            self._send(again.shard, again.scatter, again.kept, again.here, again.divisor)
        sent = self._in_flight[0]
        with record_function("shardstep::reduce"):
            try:
                if patience is not None and not sent.scatter.headers.wait_for(patience):
                    return False
                sent.scatter.headers.wait()
                is_met = _is_met(sent)
                if is_met and not self._receive(sent, patience):
                    return False
                self._in_flight.popleft()
                if self._ring is not None:
                    self._ring.release()
                if not is_met:
                    self._draw_conclusions(sent)
                    return True
            except ReduceFailed:
                raise
            except RuntimeError as error:
                raise self._failed(error) from error
            if not sent.is_over:
                self._add(sent)
        return True

    def _receive(self, sent: InFlight, patience: float | None) -> bool:
        """Wait for the data of a bucket that was met. On a mesh also across the replicas: False, if not in time.

        Also if it is of no use here any more: ranks of other replicas wait for this one's part.
        """
        if sent.across is None:
            sent.scatter.data.wait()
            if self._replicate is None:
                return True
            scatter = self._scatters[sent.shard.bucket.position]
            sent.across = AcrossReplicas(self._replicate, scatter.total(sent.scatter), sent.divisor, scatter.dtype)
        return sent.across.advance(patience)

    def _add(self, sent: InFlight) -> None:
        """Add what arrived to this rank's shard."""
        self.iteration.misses, self.iteration.behind = 0, []
        scatter = self._scatters[sent.shard.bucket.position]
        present = self._present(sent, scatter)
        mean = sent.across.mean if sent.across is not None else scatter.finish(sent.scatter, sent.divisor)
        sent.shard.add(mean, present, sent.kept)
        for index in present if sent.here is not None else ():  # used elsewhere, perhaps not here
            if index not in self.iteration.arrived and self._sharded.params[index].grad is None:
                self._shards.expose(index)

    def _draw_conclusions(self, sent: InFlight) -> None:
        """The ranks were not in the same bucket. See the note above."""
        headers = sent.scatter.headers.memory
        if sent.is_over or headers is None:
            self._keep_memory(sent.scatter)
            return
        mine = sent.number % _NUMBERS
        ahead = [(number - mine) % _NUMBERS for number in headers[:, 0].tolist()]
        if any(0 < distance <= _NUMBERS // 2 for distance in ahead):
            self._keep_memory(sent.scatter)
            self.discard()
            self.iteration.become(IterationState.LOST)
            return
        self.iteration.behind = [rank for rank, distance in enumerate(ahead) if distance]
        self.iteration.misses = 0 if any(ahead) else self.iteration.misses + 1
        if self.iteration.misses > 4 * self._settings.in_flight + 8:
            self._failure = f"the ranks reduce different buckets: {headers[:, 1].tolist()}, by rank"
            self.check()
        self._send_again([sent, *(other for other in self._in_flight if not other.is_over)])

    def _send_again(self, unmet: list[InFlight]) -> None:
        for sent in unmet:
            sent.superseded = True
            if not sent.scatter.data.works:  # in shared memory, of which other buckets will be made
                sent.scatter = sent.scatter._replace(packed=sent.scatter.packed.clone())
        self.iteration.resend = deque(unmet + list(self.iteration.resend))

    def _present(self, sent: InFlight, scatter: BucketReduceScatter) -> set[int]:
        """The parameters for which any rank had a gradient."""
        indices = sent.shard.bucket.params
        if not scatter.reports:
            return self._present_on_accelerators(indices, sent.here or [True] * len(indices))
        headers = sent.scatter.headers.memory
        if sent.here is None or headers is None:
            return set(indices)
        anywhere = headers[:, 2 : 2 + len(indices)].amax(0).tolist()
        return {index for index, there in zip(indices, anywhere, strict=True) if there}

    def _present_on_accelerators(self, indices: Sequence[int], here: list[bool]) -> set[int]:
        """There the ranks report only if the user wishes, because it makes the host wait."""
        if self._settings.find_unused:
            rows = collectives.all_gather_ints(self._reporting, [int(one) for one in here])
            return {index for index, *there in zip(indices, *rows, strict=True) if any(there)}
        for index, one in zip(indices, here, strict=True):
            if not one and self._sharded.params[index].requires_grad:
                raise RuntimeError(
                    "shard_gradients expects a gradient for every parameter that requires one, but "
                    f"{self._sharded.layout.spec_of[index].label} got none in this backward. Pass "
                    "find_unused_parameters=True if parameters may be unused."
                )
        return {index for index, one in zip(indices, here, strict=True) if one}

    # --- failing --------------------------------------------------------------------------------------------------

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
    headers = sent.scatter.headers.memory
    return headers is None or bool((headers[:, :2] == headers[0, :2]).all())

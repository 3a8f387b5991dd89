"""Buckets of gradients under way: sent in one order on all ranks, few at a time, brought in in the same order.

With each parcel a rank tells the others which iteration and bucket it is of, and for which parameters it has a
gradient: one that nobody has used is left alone by the step, one that only some have used gets the mean with zeros, as
in DDP.

[Note: iterations that were given up]
A rank may give up an iteration (``zero_grad`` without a step) after it has sent some of its buckets, all, or none, and
the others then do too, but they have sent other numbers. Parcels meet in the order in which they were sent, so those of
the next iteration may meet old ones. What all ranks have told is known to all, so all draw the same conclusions:

- all told the same iteration and bucket: it is reduced. (A rank that has given it up since throws the result away.)
- a rank told a later iteration than mine: mine was given up, there or here. I throw it away.
- else mine is current and another one is old: I send it again, one at a time, until it is met. The others do as I do:
  whoever has sent fewer parcels meets old ones of mine and sends again, until the same ones meet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from shardstep.comm import collectives
from shardstep.comm.consensus import Board
from shardstep.comm.shared_memory import Mailboxes, open_mailboxes
from shardstep.grads.reduce_scatter import Parcel, Reduction, slot_bytes
from shardstep.grads.shards import BucketGradients, GradientShards

_NUMBERS = 251  # iterations and buckets are told by a byte


class ReduceFailed(RuntimeError):
    """The gradients could not be reduced. What the ranks have sent each other since is unknown: nothing goes on."""


@dataclass
class _Sent:
    """A parcel, and what to do with what arrives."""

    state: BucketGradients
    parcel: Parcel
    kept: set[int]  # parameters to whose reduced gradient this one is added
    here: list[bool] | None  # for which parameters this rank had a gradient; None: for all
    divisor: int
    epoch: int
    over: bool = False  # given up, or sent again, since


class Parcels:
    """Sends buckets of gradients and brings them in."""

    def __init__(
        self,
        shards: GradientShards,
        board: Board,
        dtype: torch.dtype | None,
        in_flight: int,
        find_unused: bool,
        is_new: Callable[[int], bool],
    ) -> None:
        self._shards = shards
        self._group = shards.side
        self._board = board
        self._dtype = dtype
        self._in_flight = in_flight
        self._find_unused = find_unused
        self._is_new = is_new  # whether a gradient of this parameter waits to be sent
        self._reductions: list[Reduction] = []
        self._width = 0  # of a header: iteration, bucket, a byte per parameter
        self._mailboxes: Mailboxes | None = None
        self._flying: deque[_Sent] = deque()
        self._again: deque[_Sent] = deque()  # to be sent again
        self._unmet: list[Parcel] = []  # given up, and never met over sockets: their memory must stay
        self._behind: list[int] = []  # ranks that were last met in an earlier iteration
        self._misses = 0  # how often in a row the ranks were in the same iteration, but in different buckets
        self._broken = ""
        self.sent = 0  # so far
        self.epoch = 0  # the iteration, counted by zero_grad
        self.is_lost = False  # another rank has given up this iteration

    def extend(self) -> None:
        """Take over the buckets that were added. Collective."""
        self._open_mailboxes()
        params = self._shards.placement.params
        self._reductions = [Reduction(state.bucket, params, self._group, self._dtype) for state in self._shards.buckets]
        self._width = 2 + max((len(state.bucket.params) for state in self._shards.buckets), default=0)

    def _open_mailboxes(self) -> None:
        placement = self._shards.placement
        params = placement.params.values()
        if self._group.world_size == 1 or not all(collectives.sends_pairwise(self._group, p.device) for p in params):
            return
        sizes = [
            slot_bytes(state.bucket.numel, state.dtype, self._group)
            for state in self._shards.buckets
            if placement.is_small(state.bucket)
        ]
        if not sizes:
            return
        # More slots than buckets would stay unused. A smaller ring is no mistake: make_room asks it.
        in_flight, boxes = min(self._in_flight, len(self._shards.buckets)), self._mailboxes
        if boxes is None or boxes.slot_bytes < max(sizes) or boxes.in_flight < in_flight:
            self._mailboxes = open_mailboxes(self._group, in_flight, max(sizes))

    @property
    def any_flying(self) -> bool:
        return bool(self._flying)

    def tensors(self) -> list[Tensor]:
        """The memory of what is under way."""
        parcels = [sent.parcel for sent in (*self._flying, *self._again)]
        return [tensor for parcel in parcels for tensor in (parcel.packed, *parcel.parts)]

    def _tag(self, state: BucketGradients) -> int:
        """Over sockets only parcels of the same iteration and bucket meet."""
        bits = len(self._shards.buckets).bit_length()
        return 1 + self.epoch % 2 ** (29 - bits) * 2**bits + state.bucket.position

    def give_up(self, epoch: int) -> None:
        """What is under way belongs to an earlier iteration than ``epoch``, which begins."""
        self.epoch, self.is_lost, self._misses = epoch, False, 0
        self._let_go()

    def make_room(self, position: int, patience: float | None) -> bool:
        """Bring in what must be before this bucket can be sent. False if that did not come in time."""
        state = self._shards.buckets[position]
        # One of the same bucket, of an earlier round, comes first: this one may be added to it.
        while (
            self._again
            or len(self._flying) >= self._in_flight
            or (self._mailboxes is not None and self._mailboxes.is_full)
            or any(sent.state is state and not sent.over for sent in self._flying)
        ):
            if not self._bring_in_one(patience):
                return False
        return True

    def send(self, position: int, gradients: Sequence[Tensor | None], kept: set[int], divisor: int) -> None:
        """Send a bucket for which there is room. ``gradients`` are in its order."""
        here = [gradient is not None for gradient in gradients]
        told = None if all(here) else here
        self._dispatch(self._shards.buckets[position], gradients, kept, told, divisor)

    def _dispatch(
        self,
        state: BucketGradients,
        source: Sequence[Tensor | None] | Parcel,
        kept: set[int],
        here: list[bool] | None,
        divisor: int,
    ) -> None:
        self.check()
        self.sent += 1
        indices = state.bucket.params
        header = torch.ones(self._width, dtype=torch.uint8)
        header[0], header[1] = self.epoch % _NUMBERS, state.bucket.position % _NUMBERS
        if here is not None:  # a rank that holds an earlier gradient says so, too: one that has joined may not know
            flags = [one or index in kept for one, index in zip(here, indices, strict=True)]
            header[2 : 2 + len(flags)] = torch.tensor(flags)
        with record_function("shardstep::reduce"):
            try:
                slot = self._mailboxes.take() if self._mailboxes is not None else None
                parcel = self._reductions[state.bucket.position].start(source, header, slot, self._tag(state))
            except RuntimeError as error:
                raise self._failed(error) from error
        self._flying.append(_Sent(state, parcel, kept, here, divisor, self.epoch))

    def bring_in(self, patience: float | None) -> bool:
        """Bring in everything of use. False if it did not come in time; None waits as long as the group does."""
        while self._again or any(not sent.over for sent in self._flying):
            if not self._bring_in_one(patience):
                return False
        return True

    def drain(self) -> None:
        """Wait for everything, also what is of no use any more. The other ranks must have sent as much."""
        while self._flying:
            self._bring_in_one(None)

    def _bring_in_one(self, patience: float | None) -> bool:
        """Finish the oldest parcel, after sending one again if that is all there is to do. False: not in time."""
        self.check()
        if not self._flying:
            again = self._again.popleft()
            self._dispatch(again.state, again.parcel, again.kept, again.here, again.divisor)
        sent = self._flying[0]
        reduction = self._reductions[sent.state.bucket.position]
        with record_function("shardstep::reduce"):
            try:
                if patience is not None and not sent.parcel.headers.wait_for(patience):
                    return False
                sent.parcel.headers.wait()
                self._flying.popleft()
                if self._mailboxes is not None:
                    self._mailboxes.release()
                if not self._agrees(sent):
                    self._draw_conclusions(sent)
                    return True
                sent.parcel.data.wait()
            except ReduceFailed:
                raise
            except RuntimeError as error:
                raise self._failed(error) from error
            if sent.over:
                return True
            self._misses, self._behind = 0, []
            present = self._present(sent, reduction)
            total = reduction.finish(sent.parcel, sent.divisor)
        sent.state.add(total, present, sent.kept)
        for index in present if sent.here is not None else ():  # used elsewhere, perhaps not here
            if not self._is_new(index) and self._shards.placement.params[index].grad is None:
                self._shards.expose(index)
        return True

    def _let_go(self) -> None:
        """Nothing that is under way, or was to be sent again, is of use any more."""
        for sent in self._again:
            self._bury(sent.parcel)
        self._again.clear()
        for sent in self._flying:
            sent.over = True

    def _bury(self, parcel: Parcel) -> None:
        """Nobody will meet this one. What was to be sent or received over sockets keeps its memory."""
        if parcel.data.works:
            self._unmet.append(parcel)

    def _agrees(self, sent: _Sent) -> bool:
        """Whether all ranks have told the same iteration and bucket. The same answer on every rank."""
        headers = sent.parcel.headers.memory
        return headers is None or bool((headers[:, :2] == headers[0, :2]).all())

    def _draw_conclusions(self, sent: _Sent) -> None:
        """The ranks were not in the same parcel. See the note above."""
        headers = sent.parcel.headers.memory
        if sent.over or headers is None:
            self._bury(sent.parcel)
            return
        mine = sent.epoch % _NUMBERS
        ahead = [(epoch - mine) % _NUMBERS for epoch in headers[:, 0].tolist()]
        if any(0 < distance <= _NUMBERS // 2 for distance in ahead):
            self.is_lost = True
            self._bury(sent.parcel)
            self._let_go()
            return
        self._behind = [rank for rank, distance in enumerate(ahead) if distance]
        self._misses = 0 if any(ahead) else self._misses + 1
        if self._misses > 4 * self._in_flight + 8:
            self._broken = f"the ranks reduce different buckets: {headers[:, 1].tolist()}, by rank"
            self.check()
        current = [sent, *(other for other in self._flying if not other.over)]
        for other in current:
            other.over = True
            if not other.parcel.data.works:  # in shared memory, of which other parcels will be made
                other.parcel = other.parcel._replace(packed=other.parcel.packed.clone())
        self._again = deque(current + list(self._again))

    def _present(self, sent: _Sent, reduction: Reduction) -> set[int]:
        """The parameters for which any rank had a gradient."""
        indices = sent.state.bucket.params
        if not reduction.tells:
            return self._present_on_accelerators(indices, sent.here or [True] * len(indices))
        headers = sent.parcel.headers.memory
        if sent.here is None or headers is None:
            return set(indices)
        anywhere = headers[:, 2 : 2 + len(indices)].amax(0).tolist()
        return {index for index, there in zip(indices, anywhere, strict=True) if there}

    def _present_on_accelerators(self, indices: Sequence[int], here: list[bool]) -> set[int]:
        """There the ranks tell each other only if the user wishes, because it makes the host wait."""
        if self._find_unused:
            rows = collectives.all_gather_ints(self._group, [int(one) for one in here])
            return {index for index, *there in zip(indices, *rows, strict=True) if any(there)}
        placement = self._shards.placement
        for index, one in zip(indices, here, strict=True):
            if not one and placement.params[index].requires_grad:
                raise RuntimeError(
                    "shard_gradients expects a gradient for every parameter that requires one, but "
                    f"{placement.layout.spec_of[index].label} got none in this backward. Pass "
                    "find_unused_parameters=True if parameters may be unused."
                )
        return {index for index, one in zip(indices, here, strict=True) if one}

    def _failed(self, error: RuntimeError) -> ReduceFailed:
        try:
            where = self._board.explain()
        except RuntimeError:  # the store is gone with its host
            where = ""
        self._broken = f"{error}." + (f" Meanwhile {where}." if where else "")
        if self._behind:
            self._broken += (
                f" Ranks {self._behind} were in an earlier iteration: those are counted by zero_grad, which every rank "
                "must call equally often."
            )
        return ReduceFailed(f"backward: the gradients could not be reduced: {self._broken}")

    def check(self) -> None:
        """ReduceFailed if an earlier reduction failed."""
        if self._broken:
            raise ReduceFailed(
                f"the gradients could not be reduced ({self._broken}), so what the ranks have sent each other is "
                "unknown. Start the processes again, from a checkpoint."
            )

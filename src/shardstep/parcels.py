"""Buckets of gradients under way: sent in one order on all ranks, few at a time, brought in in the same order.

With each parcel a rank tells the others its number, so that ranks that are out of step find out instead of adding up
the wrong gradients, and for which parameters it has a gradient: one that nobody has used is left alone by the step, one
that only some have used gets the mean with zeros, both as in DDP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from shardstep import collectives
from shardstep.agreement import Board
from shardstep.gradients import BucketGradients, GradientShards
from shardstep.hostmemory import Mailboxes, open_mailboxes
from shardstep.reduction import Parcel, Reduction, slot_bytes

_NUMBERS = 251  # parcels are told apart by a byte


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
    number: int


class Parcels:
    """Sends buckets of gradients and brings them in."""

    def __init__(
        self,
        shards: GradientShards,
        board: Board,
        dtype: torch.dtype | None,
        in_flight: int,
        find_unused: bool,
        taken: Callable[[int], bool],
    ) -> None:
        self._shards = shards
        self._group = shards.group
        self._board = board
        self._dtype = dtype
        self._in_flight = in_flight
        self._find_unused = find_unused
        self._is_new = taken  # whether a gradient of this parameter waits to be sent
        self._reductions: list[Reduction] = []
        self._headers: list[Tensor] = []
        self._mailboxes: Mailboxes | None = None
        self._flying: deque[_Sent] = deque()
        self._broken = ""
        self.sent = 0  # so far

    def extend(self) -> None:
        """Take over the buckets that were added. Collective."""
        self._open_mailboxes()
        params = self._shards.placement.params
        self._reductions = [
            Reduction(state.bucket, params, self._group, self._dtype, self._mailboxes) for state in self._shards.buckets
        ]
        # The number of the parcel, then a byte per parameter.
        self._headers = [torch.ones(1 + len(state.bucket.params), dtype=torch.uint8) for state in self._shards.buckets]

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
        if sizes and (self._mailboxes is None or self._mailboxes.slot_bytes < max(sizes)):
            self._mailboxes = open_mailboxes(self._group, self._in_flight, max(sizes))

    @property
    def any_flying(self) -> bool:
        return bool(self._flying)

    def tensors(self) -> list[Tensor]:
        """The memory of what is under way."""
        tensors = []
        for sent in self._flying:
            tensors += [sent.parcel.packed] if sent.parcel.packed is not None else []
            tensors += sent.parcel.parts
        return tensors

    def make_room(self, position: int, patience: float | None) -> bool:
        """Bring in what must be before this bucket can be sent. False if that did not come in time."""
        state = self._shards.buckets[position]
        # One of the same bucket, of an earlier round, comes first: this one may be added to it.
        while len(self._flying) >= self._in_flight or any(sent.state is state for sent in self._flying):
            if not self._bring_in_oldest(patience):
                return False
        return True

    def send(self, position: int, gradients: Sequence[Tensor | None], kept: set[int], divisor: int) -> None:
        """Send a bucket for which there is room. ``gradients`` are in its order."""
        self.check()
        self.sent += 1
        number = self.sent % _NUMBERS
        here = [gradient is not None for gradient in gradients]
        all_here = all(here)
        state = self._shards.buckets[position]
        header = self._headers[position].clone()
        if not all_here:  # a rank that holds an earlier gradient says so, too: one that has joined may not know
            indices = state.bucket.params
            header[1:] = torch.tensor([one or index in kept for one, index in zip(here, indices, strict=True)])
        header[0] = number
        with record_function("shardstep::reduce"):
            try:
                parcel = self._reductions[position].start(gradients, header)
            except RuntimeError as error:
                raise self._failed(error) from error
        self._flying.append(_Sent(state, parcel, kept, None if all_here else here, divisor, number))

    def bring_in(self, patience: float | None) -> bool:
        """Bring in everything. False if something did not come in time; None waits as long as the group does."""
        while self._flying:
            if not self._bring_in_oldest(patience):
                return False
        return True

    def _bring_in_oldest(self, patience: float | None) -> bool:
        self.check()
        sent = self._flying[0]
        reduction = self._reductions[sent.state.bucket.position]
        with record_function("shardstep::reduce"):
            try:
                if patience is not None and not sent.parcel.headers.wait_for(patience):
                    return False
                sent.parcel.headers.wait()
                sent.parcel.data.wait()
            except RuntimeError as error:
                raise self._failed(error) from error
            self._flying.popleft()
            present = self._present(sent, reduction)
            total = reduction.finish(sent.parcel, sent.divisor)
        sent.state.add(total, present, sent.kept)
        for index in present if sent.here is not None else ():  # used elsewhere, perhaps not here
            if not self._is_new(index):
                self._shards.expose(index)
        return True

    def _present(self, sent: _Sent, reduction: Reduction) -> set[int]:
        """The parameters for which any rank had a gradient."""
        indices = sent.state.bucket.params
        if not reduction.tells:
            return self._present_on_accelerators(indices, sent.here or [True] * len(indices))
        headers = sent.parcel.headers.memory
        assert headers is not None
        numbers = headers[:, 0].tolist()
        if numbers != [sent.number] * self._group.world_size:
            self._broken = f"the ranks are in different parcels: {numbers} modulo {_NUMBERS}, by rank"
            self.check()
        if sent.here is None:
            return set(indices)
        return {index for index, there in zip(indices, headers[:, 1:].amax(0).tolist(), strict=True) if there}

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
        return ReduceFailed(f"backward: the gradients could not be reduced: {self._broken}")

    def check(self) -> None:
        """ReduceFailed if an earlier reduction failed."""
        if self._broken:
            raise ReduceFailed(
                f"the gradients could not be reduced ({self._broken}), so what the ranks have sent each other is "
                "unknown. Start the processes again, from a checkpoint."
            )

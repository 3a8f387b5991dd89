"""The float32 masters of this rank's pieces of 16-bit parameters, over all buckets (``master_weights``).

The local optimizer is built over float32 tensors, so its state is float32 whatever its class. Before an update
the masters are brought into these tensors (``open``), and gradients are cast up; after it they are rounded into the
parameters (``close``), which are gathered in 16 bits.

[Note: scratch memory]
Between steps a rank keeps what the mode says. For the time of an update it needs float32 memory for gradients, for
masters that are not kept as such, and copies of small parameters side by side (``master_blocks.py``). Buckets that are
stepped one after the other use the same memory, so that is as much as the largest needs. An optimizer whose
step cannot be split, and a step with a closure, has all of it at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardstep.layout.specs import Layout
from shardstep.params.bucket_masters import BucketMasters, Scratch
from shardstep.params.master_blocks import block_size
from shardstep.params.master_modes import MasterMode, MasterSettings
from shardstep.params.random_bits import Counters, Draw

# Options of a group that is rounded at random. They are saved with the others, so a resumed run goes on with the same.
SEED, STEP = ROUNDING = ("rounding_seed", "rounding_step")
_ALIGNMENT = 64


class Masters:
    """The masters of one optimizer on this rank."""

    def __init__(self, rank: int, settings: MasterSettings) -> None:
        self._rank, self.settings = rank, settings
        self._buckets: dict[int, BucketMasters] = {}  # by position
        self._bucket_of: dict[int, BucketMasters] = {}  # by parameter, of which this rank has a piece
        self._gradients: dict[int, Tensor] = {}  # for the next update, in any dtype
        self._arrangement: tuple[bool, tuple[int, ...]] | None = None
        self._scratch: list[Tensor] = []
        self.modes: list[MasterMode] = []  # by group
        self.gradient_factor: Tensor | None = None  # by which gradients are multiplied once they are float32

    def __contains__(self, index: int) -> bool:
        """Whether this rank has a master of (its piece of) a parameter."""
        return index in self._bucket_of

    def __bool__(self) -> bool:
        return bool(self._buckets)

    # --- memory ---------------------------------------------------------------------------------------------------

    def extend(self, layout: Layout, params: Mapping[int, Tensor]) -> None:
        """Take over what a longer layout adds."""
        for bucket in layout.buckets:
            mode = MasterMode(layout.spec_of[bucket.params[0]].master)
            if mode is MasterMode.NONE or bucket.position in self._buckets:
                continue
            made = BucketMasters(bucket, layout, self._rank, mode)
            if made.pieces:
                made.bind(params, None)
                self._buckets[bucket.position] = made
                self._bucket_of.update((piece.param, made) for piece in made.pieces)

    def forget(self, indices: Iterable[int]) -> None:
        """Undo ``extend``: whole buckets go with their parameters."""
        for index in indices:
            gone = self._bucket_of.pop(index, None)
            if gone is not None:
                self._buckets.pop(gone.bucket.position, None)

    def bind(self, params: Mapping[int, Tensor], buffers: Sequence[Tensor | None]) -> None:
        """Follow the parameters to the memory that they have now. ``buffers``: of bucket views."""
        self._arrangement, self._scratch = None, []
        for position, bucket in self._buckets.items():
            bucket.bind(params, buffers[position])

    def arrange(self, active: Sequence[int], whole: bool) -> None:
        """Have scratch memory for the buckets of a step: ``whole``, at once, or one after the other."""
        positions = tuple(position for position in active if position in self._buckets)
        if not self._buckets or self._arrangement == (whole, positions):
            return
        self._scratch = []
        chosen = [self._buckets[position] for position in positions]
        with torch.inference_mode(False):  # memory of a step in that mode (``eval``) is used in others, too
            for bucket in self._buckets.values():
                bucket.unplace()
            for device in dict.fromkeys(bucket.device for bucket in chosen):
                self._place([bucket for bucket in chosen if bucket.device == device], device, whole)
        self._arrangement = whole, positions

    def _place(self, buckets: Sequence[BucketMasters], device: torch.device, whole: bool) -> None:
        gradients = _Pool(buckets, whole)
        values = _Pool([bucket for bucket in buckets if bucket.needs_values], whole)
        copied = max((bucket.copied_numel for bucket in buckets), default=0)  # used for a moment, one after the other
        wide, cast = (torch.zeros(pool.numel, dtype=torch.float32, device=device) for pool in (values, gradients))
        narrow = torch.zeros(copied, dtype=torch.int16, device=device)
        size = min(max((bucket.numel for bucket in buckets), default=0), block_size(device))
        # Accelerators have allocators that keep memory.
        row = torch.empty(size, dtype=torch.int32, device=device) if device.type == "cpu" else None
        at_random = any(bucket.mode is MasterMode.STOCHASTIC for bucket in buckets)
        counters = Counters(size, device) if at_random else None
        self._scratch += [wide, cast, narrow, *([] if row is None else [row])]
        self._scratch += [] if counters is None else [counters.steps, counters.memory]
        for bucket in buckets:
            lent = values.part(wide, bucket) if bucket.needs_values else None
            bucket.place(Scratch(lent, gradients.part(cast, bucket), narrow, row, counters))

    def let_go(self) -> None:
        """Have no scratch memory until the next step: pickle would write all of it for every view."""
        self._arrangement, self._scratch = None, []
        for bucket in self._buckets.values():
            bucket.unplace()

    def memory(self) -> list[Tensor]:
        """What is kept between steps: masters and remainders."""
        return [bucket.kept for bucket in self._buckets.values() if bucket.kept is not None]

    def scratch(self) -> list[Tensor]:
        """What updates need besides."""
        return self._scratch

    # --- questions ------------------------------------------------------------------------------------------------

    def tensor(self, index: int) -> Tensor:
        """What the local optimizer steps for this rank's piece of a parameter."""
        return self._bucket_of[index].tensors[index]

    def weights(self, only: int | None = None) -> dict[int, Tensor]:
        """The masters of pieces that were stepped, as the parameters are now, by parameter; ``only``: of one."""
        buckets = [*self._buckets.values()] if only is None else [b for b in (self._bucket_of.get(only),) if b]
        found = {index: master for bucket in buckets for index, master in bucket.weights().items()}
        return found if only is None else {index: master for index, master in found.items() if index == only}

    def load(self, weights: Mapping[int, Tensor], unstepped: Collection[int] = ()) -> None:
        """Have these masters, and write the parameters anew from them. All others begin as the parameters.

        ``unstepped``: of parameters that were not stepped yet.
        """
        self._arrangement, self._scratch = None, []
        for bucket in self._buckets.values():
            bucket.load(weights, unstepped)

    @property
    def are_used(self) -> bool:
        """Whether the optimizer steps in float32 for any 16-bit parameter, on this rank or another."""
        return any(mode is not MasterMode.NONE for mode in self.modes)

    @property
    def are_kept(self) -> bool:
        """Whether there are masters that outlive a step, on this rank or another."""
        return any(mode.is_kept for mode in self.modes)

    def keeps(self, index: int) -> bool:
        """Whether this rank keeps a master of its piece between steps."""
        return index in self._bucket_of and self._bucket_of[index].mode.is_kept

    # --- an update ------------------------------------------------------------------------------------------------

    def set_gradient(self, index: int, gradient: Tensor | None) -> None:
        """The gradient of the next update of a piece, in any dtype."""
        if gradient is None:
            self._gradients.pop(index, None)
            return
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"step expects dense gradients but got {gradient.layout} for a parameter with master_weights. Make the "
                "gradient dense (for an embedding: sparse=False)."
            )
        self._gradients[index] = gradient

    def set_gradients(self, indices: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """``set_gradient`` for many pieces. Dense gradients."""
        self._gradients.update(zip(indices, gradients, strict=True))

    def gradient(self, index: int) -> Tensor | None:
        return self._gradients.get(index)

    def release_gradients(self) -> None:
        self._gradients.clear()
        for bucket in self._buckets.values():
            for tensor in bucket.tensors.values():
                tensor.grad = None

    def open(self, positions: Iterable[int]) -> None:
        """Before an update of these buckets: masters, as the parameters are now, and their gradients."""
        for bucket in self._chosen(positions):
            bucket.open()
            bucket.take_gradients(self._gradients, self.gradient_factor)

    def take_gradients(self, positions: Iterable[int]) -> None:
        """In the middle of an update a closure has made new gradients."""
        for bucket in self._chosen(positions):
            bucket.take_gradients(self._gradients, self.gradient_factor)

    def close(self, positions: Iterable[int], param_groups: Sequence[Mapping[str, Any]]) -> None:
        """After an update of these buckets: round the masters into the parameters."""
        chosen = self._chosen(positions)
        draws = self._draws(param_groups) if chosen else []
        for bucket in chosen:
            bucket.close(draws)

    def changed(self, positions: Iterable[int]) -> None:
        """For autograd: all parameters of these buckets were changed."""
        for bucket in self._chosen(positions):
            bucket.changed()

    def complete_options(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Where results are rounded at random, what that goes on with is an option of the group."""
        for group, mode in zip(param_groups, self.modes, strict=True):
            if mode is MasterMode.STOCHASTIC:
                group.setdefault(SEED, self.settings.seed)
                group.setdefault(STEP, 0)

    def count_step(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Other random numbers from now on. On every rank alike."""
        self.complete_options(param_groups)
        for group, mode in zip(param_groups, self.modes, strict=True):
            if mode is MasterMode.STOCHASTIC:
                group[STEP] += 1

    def _draws(self, param_groups: Sequence[Mapping[str, Any]]) -> list[Draw]:
        return [Draw(int(group.get(SEED, self.settings.seed)), int(group.get(STEP, 0))) for group in param_groups]

    def _chosen(self, positions: Iterable[int]) -> list[BucketMasters]:
        return [self._buckets[position] for position in positions if position in self._buckets]


class _Pool:
    """Who has which part of some scratch memory: side by side, or all the same."""

    def __init__(self, buckets: Sequence[BucketMasters], whole: bool) -> None:
        self._starts: dict[int, int] = {}
        self.numel = 0
        for bucket in buckets:
            room = -(-bucket.numel // _ALIGNMENT) * _ALIGNMENT
            self._starts[bucket.bucket.position] = self.numel if whole else 0
            self.numel = self.numel + room if whole else max(self.numel, room)

    def part(self, memory: Tensor, bucket: BucketMasters) -> Tensor:
        start = self._starts[bucket.bucket.position]
        return memory[start : start + bucket.numel]

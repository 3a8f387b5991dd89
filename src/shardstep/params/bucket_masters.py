"""The float32 masters of one bucket, as far as this rank owns it: opened before an update, rounded after it.

Masters lie in one flat range, each piece where it lies in the bucket. What a rank keeps between steps depends on the
mode; what it needs for the time of an update is scratch memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardstep.comm.byte_views import flat_memory
from shardstep.layout.specs import Bucket, Layout, Piece
from shardstep.params.master_blocks import Blocks, Place, Run, copied_numel, runs_of
from shardstep.params.master_modes import MasterMode
from shardstep.params.pieces import span_of
from shardstep.params.random_bits import Counters, Draw, RandomBits, Segment, key_of
from shardstep.params.rounding import follow, join, round_nearest, round_stochastic, rounds_to, split

_ALIGNMENT = 64  # elements: as torch's own allocations begin, and with the first element of a pair


class Scratch(NamedTuple):
    """Memory for the time of an update, which other buckets use, too."""

    values: Tensor | None  # float32, for masters that are not kept as such
    gradients: Tensor  # float32
    narrow: Tensor  # int16, for copies of small parameters
    row: Tensor | None  # int32, a block's worth. None: it is allocated where it is needed
    counters: Counters | None  # for random rounding


class BucketMasters:
    """This rank's masters of one bucket."""

    def __init__(self, bucket: Bucket, layout: Layout, rank: int, mode: MasterMode) -> None:
        self.bucket, self.mode = bucket, mode
        self.pieces = list(bucket.pieces(rank))
        start, stop = bucket.shard_range(rank)
        self._base = start - start % _ALIGNMENT
        self.numel = stop - self._base
        self._start = start - self._base
        self._specs = [layout.spec_of[piece.param] for piece in self.pieces]
        self.tensors: dict[int, Tensor] = {}  # for the local optimizer, by parameter
        self.kept: Tensor | None = None  # between steps: masters, or remainders. None: masters are the parameters
        self.stepped: set[int] = set()  # parameters that were, or whose masters were loaded
        self._params: list[Tensor] = []  # by piece
        self._spans: list[Tensor] = []  # of the parameters, by piece
        self._runs: list[Run] = []
        self._blocks: Blocks | None = None  # while there is scratch memory
        self._gradient_spans: list[Tensor] = []
        self._random: RandomBits | None = None
        self._counters: Counters | None = None

    # --- memory ---------------------------------------------------------------------------------------------------

    def bind(self, params: Mapping[int, Tensor], buffer: Tensor | None) -> None:
        """Follow the parameters to the memory that they have now. ``buffer``: of bucket views."""
        as_they_lay = [] if self.kept is None else self._spans_in(self.kept)
        self._params = [params[piece.param] for piece in self.pieces]
        self._spans = [
            # With versions of their own: frozen parameters are written, too, with what they are (see ``changed``).
            span_of(param, None if piece.whole else slice(piece.start, piece.stop)).data
            for param, piece in zip(self._params, self.pieces, strict=True)
        ]
        self.device, self.dtype = self._params[0].device, self._params[0].dtype
        self._runs = self._find_runs(buffer)
        if self.kept is not None:
            self.kept = self._brought_along(self.kept, as_they_lay)
        if not self.tensors:
            self._make_tensors()
        self.unplace()

    def _brought_along(self, kept: Tensor, as_they_lay: Sequence[Tensor]) -> Tensor:
        """What is kept, on the device of the parameters, and each piece in the order in which its parameter lies."""
        lie_alike = all(
            one.stride() == other.stride() for one, other in zip(as_they_lay, self._spans_in(kept), strict=True)
        )
        with torch.inference_mode(False), torch.no_grad():
            if lie_alike:
                return kept.to(self.device)
            moved = torch.zeros_like(kept, device=self.device)
            for target, source in zip(self._spans_in(moved), as_they_lay, strict=True):  # maybe on another device
                target.copy_(source)
        return moved

    def _make_tensors(self) -> None:
        for piece, param in zip(self.pieces, self._params, strict=True):
            hollow = _hollow(self._shape(piece, param), self.device)
            self.tensors[piece.param] = torch.nn.Parameter(hollow, requires_grad=param.requires_grad)

    def _find_runs(self, buffer: Tensor | None) -> list[Run]:
        """Where the parameters are. With bucket views they lie as the masters do, if those lie as they do."""
        places = [
            Place(piece.offset - self._base, piece.offset - self._base + piece.numel, span)
            for piece, span in zip(self.pieces, self._spans, strict=True)
        ]
        if buffer is None or not (self._as_they_lie or all(map(Tensor.is_contiguous, self._spans))):
            return runs_of(places, self.device, self._as_they_lie)
        return [Run(self._start, self.numel, places, buffer[self._base + self._start : self._base + self.numel])]

    @property
    def _as_they_lie(self) -> bool:
        """Whether masters lie in the order of their parameters' memory (channels_last), or else of their elements.

        Random numbers are for elements: a parameter that is cut elsewhere lies in the order of its elements there.
        """
        return self.mode is not MasterMode.STOCHASTIC

    @property
    def needs_values(self) -> bool:
        """Whether an update needs scratch memory for the masters themselves."""
        return self.mode is not MasterMode.FLOAT32

    @property
    def copied_numel(self) -> int:
        """How many elements it copies, because their parameters are small."""
        return copied_numel(self._runs)

    def place(self, scratch: Scratch) -> None:
        """Use this memory from now on."""
        values = self._kept_or_new() if self.mode is MasterMode.FLOAT32 else scratch.values
        assert values is not None
        kept = self._kept_or_new() if self.mode is MasterMode.REMAINDER else None
        self._point_at(values)
        self._gradient_spans = self._spans_in(scratch.gradients)
        self._blocks = Blocks(self._runs, values, kept, scratch.narrow.view(self.dtype), scratch.row)
        self._counters = scratch.counters

    def unplace(self) -> None:
        """Let go of scratch memory."""
        self._blocks, self._gradient_spans, self._random, self._counters = None, [], None, None
        if self.mode is MasterMode.FLOAT32 and self.kept is not None:
            self._point_at(self.kept)
            return
        for piece, param in zip(self.pieces, self._params, strict=True):
            self.tensors[piece.param].data = _hollow(self._shape(piece, param), self.device)

    def _kept_or_new(self) -> Tensor:
        if self.kept is None:
            wide = self.mode is MasterMode.FLOAT32
            with torch.inference_mode(False):
                self.kept = torch.zeros(self.numel, dtype=torch.float32 if wide else torch.int16, device=self.device)
            if wide:
                self._copy_parameters(self._spans_in(self.kept))
        return self.kept

    def _copy_parameters(self, targets: Sequence[Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(list(targets), self._spans)

    def _point_at(self, flat: Tensor) -> None:
        for piece, span in zip(self.pieces, self._spans_in(flat), strict=True):
            self.tensors[piece.param].data = span

    @staticmethod
    def _shape(piece: Piece, param: Tensor) -> tuple[int, ...]:
        return tuple(param.shape) if piece.whole else (piece.numel,)

    def _spans_in(self, flat: Tensor) -> list[Tensor]:
        """The pieces in a flat range, each in the shape of its parameter's (and its order, see ``_as_they_lie``)."""
        found = []
        for piece, span in zip(self.pieces, self._spans, strict=True):
            part = self._range(flat, piece)
            as_it_lies = self._as_they_lie and not span.is_contiguous() and flat_memory(span) is not None
            found.append(part.as_strided(span.shape, span.stride()) if as_it_lies else part.view(span.shape))
        return found

    def _range(self, flat: Tensor, piece: Piece) -> Tensor:
        return flat[piece.offset - self._base : piece.offset - self._base + piece.numel]

    # --- an update ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Have the masters in the tensors of the local optimizer, after what was done to the parameters."""
        assert self._blocks is not None
        self._blocks.read()
        for _, values, narrow, kept, scratch in self._blocks:
            if self.mode is MasterMode.STOCHASTIC:
                values.copy_(narrow)
            elif kept is not None:
                join(narrow, kept, values, scratch)
            else:
                follow(values, narrow, scratch)

    def take_gradients(self, gradients: Mapping[int, Tensor], factor: Tensor | None) -> None:
        """Give the masters their gradients, cast up, and multiplied by ``factor``; none to those without."""
        targets, sources = [], []
        for piece, target in zip(self.pieces, self._gradient_spans, strict=True):
            gradient, tensor = gradients.get(piece.param), self.tensors[piece.param]
            if gradient is None:
                tensor.grad = None
                continue
            self.stepped.add(piece.param)
            if gradient.dtype != torch.float32 or factor is not None:
                targets.append(target)
                sources.append(gradient.detach().view(target.shape))
                gradient = target
            tensor.grad = gradient
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)
                if factor is not None:
                    torch._foreach_mul_(targets, factor.to(self.device))

    def close(self, draws: Sequence[Draw]) -> None:
        """Round the masters into the parameters. ``draws``: by group, for random rounding."""
        assert self._blocks is not None
        if self.mode is MasterMode.STOCHASTIC:
            self._round_at_random(self._blocks, draws)
        else:
            for _, values, narrow, kept, scratch in self._blocks:
                if kept is not None:
                    split(values, narrow, kept, scratch)
                else:
                    round_nearest(values, narrow, scratch)
        self._blocks.write()
        self.changed([param for param in self._params if param.requires_grad or param.grad is not None])

    def changed(self, params: Sequence[Tensor] | None = None) -> None:
        """For autograd: these parameters were changed, or all."""
        chosen = self._params if params is None else params
        if chosen:
            torch.autograd.graph.increment_version(chosen)

    def _round_at_random(self, blocks: Blocks, draws: Sequence[Draw]) -> None:
        if self._random is None:
            self._random = RandomBits(self._segments(), [block.where for block in blocks], self.device)
        assert self._counters is not None
        for block, random in zip(blocks, self._random.draw(draws, self._counters), strict=True):
            round_stochastic(block.values, random, block.narrow, block.scratch)

    def _segments(self) -> list[Segment]:
        starts = [piece.offset - self._base for piece in self.pieces]
        return [
            Segment(start, start + piece.numel, piece.start, key_of(spec.name, spec.index), spec.group)
            for start, piece, spec in zip(starts, self.pieces, self._specs, strict=True)
            if piece.numel
        ]

    # --- state ----------------------------------------------------------------------------------------------------

    def weights(self) -> dict[int, Tensor]:
        """The masters of pieces that were stepped, as the parameters are now: what is kept, or made for the caller."""
        if self.kept is None or not self.mode.is_kept:
            return {}
        narrow = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        self._copy_parameters(self._spans_in(narrow))
        wide = self._followed(narrow)
        found = zip(self.pieces, self._spans_in(wide), strict=True)
        return {piece.param: span for piece, span in found if piece.param in self.stepped}

    def _followed(self, narrow: Tensor) -> Tensor:
        """What is kept; a copy if parameters were changed. Who swaps weights, saves and swaps back, keeps masters."""
        assert self.kept is not None
        if self.mode is MasterMode.REMAINDER:
            wide = torch.empty(self.numel, dtype=torch.float32, device=self.device)
            join(narrow, self.kept, wide)
            return wide
        if rounds_to(self.kept, narrow):
            return self.kept
        wide = self.kept.clone()
        follow(wide, narrow)
        return wide

    def load(self, weights: Mapping[int, Tensor], unstepped: Collection[int]) -> None:
        """Have the masters in ``weights`` that are mine, and the parameters rounded from them. Others begin anew."""
        found = {piece.param for piece in self.pieces if piece.param in weights} if self.mode.is_kept else set()
        self.kept, self.stepped = None, found - set(unstepped)
        if found:
            wide = torch.zeros(self.numel, dtype=torch.float32, device=self.device)
            targets = self._spans_in(wide)
            self._copy_parameters(targets)
            for piece, target in zip(self.pieces, targets, strict=True):
                if piece.param in found:
                    target.copy_(weights[piece.param].view(target.shape))
            narrow = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            self.kept = wide
            if self.mode is MasterMode.REMAINDER:
                self.kept = torch.empty(self.numel, dtype=torch.int16, device=self.device)
                split(wide, narrow, self.kept)
            else:
                round_nearest(wide, narrow)
            with torch.no_grad():
                torch._foreach_copy_(self._spans, self._spans_in(narrow))
            self.changed()
        self.unplace()


def _hollow(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Zeros of a shape, with memory for one element.

    What a class makes like it when it is built must lie in memory as usual: for a single element ``zeros_like`` keeps
    the stride, also 0, and bytes of such a tensor cannot be viewed.
    """
    if torch.Size(shape).numel() <= 1:
        return torch.zeros(shape, dtype=torch.float32, device=device)
    return torch.zeros((), dtype=torch.float32, device=device).expand(shape)

"""The float32 masters of one bucket, as far as this rank owns it: opened before an update, rounded after it.

Masters lie in one flat range, each parameter where it lies in the bucket, so that a pass over all of them is a few
calls. What a rank keeps between steps depends on the mode; what it needs for the time of an update is scratch memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from shardstep.layout.specs import Bucket, Layout, Piece
from shardstep.params.master_modes import MasterMode
from shardstep.params.pieces import span_of
from shardstep.params.random_bits import Draw, RandomBits, Segment, key_of
from shardstep.params.rounding import Room, differ, join, round_nearest, round_stochastic, spans, split

_ALIGNMENT = 64  # elements: as torch's own allocations begin, and with the first element of a pair


class BucketMasters:
    """This rank's masters of one bucket."""

    def __init__(self, bucket: Bucket, layout: Layout, rank: int, mode: MasterMode) -> None:
        self.bucket, self.mode = bucket, mode
        self.pieces = list(bucket.pieces(rank))
        start, stop = bucket.shard_range(rank)
        self._base = start - start % _ALIGNMENT
        self.numel = stop - self._base
        self._is_tight = start == self._base
        self._specs = [layout.spec_of[piece.param] for piece in self.pieces]
        self.tensors: dict[int, Tensor] = {}  # for the local optimizer, by parameter
        self.kept: Tensor | None = None  # between steps: masters, or remainders. None: masters are the parameters
        self.stepped: set[int] = set()  # parameters that were, or whose masters were loaded
        self._values = self._gradients = self._narrow = torch.empty(0)
        self._params: list[Tensor] = []  # by piece
        self._spans: list[Tensor] = []  # of the parameters, by piece
        self._in_place: Tensor | None = None  # the memory of the parameters, if it lies as the masters do
        self._narrow_spans: list[Tensor] | None = None  # of the copy of the parameters; None: they are used in place
        self._gradient_spans: list[Tensor] = []
        self._random: RandomBits | None = None
        self._room: Room | None = None

    # --- memory ---------------------------------------------------------------------------------------------------

    def bind(self, params: Mapping[int, Tensor], buffer: Tensor | None) -> None:
        """Follow the parameters to the memory that they have now. ``buffer``: of bucket views."""
        self._params = [params[piece.param] for piece in self.pieces]
        self._spans = [
            span_of(param, None if piece.whole else slice(piece.start, piece.stop))
            for param, piece in zip(self._params, self.pieces, strict=True)
        ]
        self.device, self.dtype = self._params[0].device, self._params[0].dtype
        self._in_place = self._memory_of_parameters(buffer)
        if self.kept is not None and self.kept.device != self.device:
            self.kept = self.kept.to(self.device)
        if not self.tensors:
            self._make_tensors()
        self._random = None
        self.unplace()

    def _make_tensors(self) -> None:
        for piece, param in zip(self.pieces, self._params, strict=True):
            hollow = _hollow(self._shape(piece, param), self.device)
            self.tensors[piece.param] = torch.nn.Parameter(hollow, requires_grad=param.requires_grad)

    def _memory_of_parameters(self, buffer: Tensor | None) -> Tensor | None:
        """The parameters' own memory, if it is one range that lies as the masters do."""
        if not self._is_tight:
            return None
        if buffer is not None:
            return buffer[self._base : self._base + self.numel]
        alone = len(self.pieces) == 1 and self._params[0].is_contiguous()
        return self._spans[0].reshape(-1) if alone else None

    @property
    def needs_values(self) -> bool:
        """Whether an update needs scratch memory for the masters themselves."""
        return self.mode is not MasterMode.FLOAT32

    @property
    def needs_narrow(self) -> bool:
        """Whether it needs scratch memory for a copy of the parameters."""
        return self._in_place is None

    def place(self, values: Tensor | None, gradients: Tensor, narrow: Tensor | None, room: Room) -> None:
        """Use this scratch memory from now on; ``values``, ``narrow``: if it is needed."""
        self._room = room
        if self.mode is MasterMode.FLOAT32:
            values = self._kept_or_new()
        assert values is not None
        self._values, self._gradients = values, gradients
        self._point_at(values)
        self._gradient_spans = self._spans_in(gradients)
        if self._in_place is not None:
            self._narrow, self._narrow_spans = self._in_place, None
        else:
            assert narrow is not None
            self._narrow = narrow.view(self.dtype)
            self._narrow_spans = self._spans_in(self._narrow)

    def unplace(self) -> None:
        """Let go of scratch memory."""
        self._values = self._gradients = self._narrow = torch.empty(0)
        self._narrow_spans, self._gradient_spans, self._room = None, [], None
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
        """The pieces in a flat range, each in the shape and order of its parameter's."""
        found = []
        for piece, span in zip(self.pieces, self._spans, strict=True):
            start = piece.offset - self._base
            part = flat[start : start + piece.numel]
            dense = span.is_contiguous() or not _is_dense(span)
            found.append(part.view(span.shape) if dense else part.as_strided(span.shape, span.stride()))
        return found

    # --- an update ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Have the masters in the tensors of the local optimizer, after what was done to the parameters."""
        narrow = self._read()
        if self.mode is MasterMode.STOCHASTIC:
            self._values.copy_(narrow)
            return
        kept = self._kept_or_new()
        for part in spans(self.numel, self.device):
            if self.mode is MasterMode.REMAINDER:
                join(narrow[part], kept[part], self._values[part])
            else:
                _follow(narrow[part], self._values[part], self._room)

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
        if self.mode is MasterMode.STOCHASTIC:
            assert self._room is not None
            for part, random in self._random_bits().draw(draws, self._room):
                round_stochastic(self._values[part], random, self._narrow[part], self._room)
        else:
            kept = self._kept_or_new()
            for part in spans(self.numel, self.device):
                if self.mode is MasterMode.REMAINDER:
                    split(self._values[part], self._narrow[part], kept[part], self._room)
                else:
                    round_nearest(self._values[part], self._narrow[part], self._room)
        self._write()

    def _random_bits(self) -> RandomBits:
        if self._random is None:
            segments = []
            for piece, spec in zip(self.pieces, self._specs, strict=True):
                start = piece.offset - self._base
                key = key_of(spec.name, spec.index)
                segments.append(Segment(start, start + piece.numel, piece.start, key, spec.group))
            self._random = RandomBits(segments, self.numel, self.device)
        return self._random

    def _read(self) -> Tensor:
        """The parameters in one flat range."""
        if self._narrow_spans is not None:
            self._copy_parameters(self._narrow_spans)
        return self._narrow

    def _write(self) -> None:
        if self._narrow_spans is not None:
            with torch.no_grad():
                torch._foreach_copy_(self._spans, self._narrow_spans)
        else:
            torch.autograd.graph.increment_version(self._params)

    # --- state ----------------------------------------------------------------------------------------------------

    def weights(self) -> dict[int, Tensor]:
        """The masters of pieces that were stepped, as the parameters are now: what is kept, or made for the caller."""
        if self.kept is None or not self.mode.is_kept:
            return {}
        narrow = self._copied_parameters()
        wide = (
            self._followed(narrow) if self.mode is MasterMode.FLOAT32 else torch.empty(self.numel, device=self.device)
        )
        if self.mode is MasterMode.REMAINDER:
            for part in spans(self.numel, self.device):
                join(narrow[part], self.kept[part], wide[part])
        found = zip(self.pieces, self._spans_in(wide), strict=True)
        return {piece.param: span for piece, span in found if piece.param in self.stepped}

    def _followed(self, narrow: Tensor) -> Tensor:
        """What is kept; a copy if parameters were changed. Who swaps weights, saves and swaps back, keeps masters."""
        assert self.kept is not None
        wide = self.kept
        for part in spans(self.numel, self.device):
            rounded = torch.empty_like(narrow[part])
            round_nearest(self.kept[part], rounded)
            if differ(rounded, narrow[part]):
                wide = wide.clone() if wide is self.kept else wide
                _follow(narrow[part], wide[part])
        return wide

    def load(self, weights: Mapping[int, Tensor], unstepped: Collection[int]) -> None:
        """Have the masters in ``weights`` that are mine, and the parameters rounded from them. Others begin anew."""
        found = {piece.param for piece in self.pieces if piece.param in weights} if self.mode.is_kept else set()
        self.kept, self.stepped = None, found - set(unstepped)
        if found:
            wide = torch.zeros(self.numel, device=self.device)
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
        self.unplace()

    def _copied_parameters(self) -> Tensor:
        """The parameters in one flat range: their own memory, or new."""
        if self._in_place is not None:
            return self._in_place
        narrow = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        self._copy_parameters(self._spans_in(narrow))
        return narrow


def _hollow(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Zeros of a shape, with memory for one element.

    What a class makes like it when it is built must lie in memory as usual: for a single element ``zeros_like`` keeps
    the stride, also 0, and bytes of such a tensor cannot be viewed.
    """
    if torch.Size(shape).numel() <= 1:
        return torch.zeros(shape, device=device)
    return torch.zeros((), device=device).expand(shape)


def _follow(narrow: Tensor, master: Tensor, room: Room | None = None) -> None:
    """Where the parameter is not what its master rounds to, somebody has changed it: the master begins as it is."""
    rounded = torch.empty_like(narrow) if room is None else room.row(1, narrow.numel()).view(narrow.dtype)
    rounded = rounded[: narrow.numel()]
    round_nearest(master, rounded, room)
    if not differ(rounded, narrow):
        return
    changed = rounded.view(torch.int16) != narrow.view(torch.int16)
    torch.where(changed, narrow.to(torch.float32), master, out=master)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True

"""This rank's pieces of the parameters, as tensors for the local optimizer to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shardstep.layout.specs import Layout, Piece
from shardstep.params.dtensors import LocalParameter


class Separate(NamedTuple):
    """A piece that is a tensor of its own over its parameter's memory."""

    param: Tensor
    tensor: Tensor
    where: slice | None  # the range of the parameter's elements; None: all


class MasterTensors(Protocol):
    """The masters of an optimizer, as far as pieces need them."""

    def __contains__(self, index: int) -> bool: ...

    def tensor(self, index: int) -> Tensor: ...

    def set_gradient(self, index: int, gradient: Tensor | None) -> None: ...

    def set_gradients(self, indices: Sequence[int], gradients: Sequence[Tensor]) -> None: ...

    def gradient(self, index: int) -> Tensor | None: ...

    def release_gradients(self) -> None: ...


class LocalPieces:
    """This rank's pieces.

    A piece that covers its parameter *is* the parameter. A piece of a cut parameter is a tensor of its own over the
    same memory, with a slice of the gradient. With ``apart`` every piece is a tensor of its own: for steps that take
    their gradients from elsewhere than the parameters'. So is that of a DTensor. Where there is a float32 master, the
    tensor is that.
    """

    def __init__(self, rank: int, apart: bool = False, masters: MasterTensors | None = None) -> None:
        self._rank = rank
        self._apart = apart
        self._masters = masters
        self.pieces: dict[int, Piece] = {}  # parameter index -> my piece of it (a rank has one at the most)
        self.tensors: dict[int, Tensor] = {}
        self._separate: dict[int, dict[int, Separate]] = {}  # by bucket, by parameter
        self._mastered: dict[int, list[int]] = {}  # by bucket: parameters with masters

    def extend(self, layout: Layout, params: Mapping[int, Tensor]) -> None:
        """Take over what a longer layout adds."""
        pieces = {piece.param: piece for piece in layout.pieces(self._rank)}
        for index in sorted(pieces.keys() - self.pieces.keys()):
            piece, param = pieces[index], params[index]
            self.pieces[index] = piece
            if self._masters is not None and index in self._masters:
                self.tensors[index] = self._masters.tensor(index)
                self._mastered.setdefault(piece.bucket, []).append(index)
                continue
            if piece.whole and not self._apart and not isinstance(param, LocalParameter):
                self.tensors[index] = param
                continue
            where = None if piece.whole else slice(piece.start, piece.stop)
            tensor = torch.nn.Parameter(span_of(param, where), requires_grad=param.requires_grad)
            self.tensors[index] = tensor
            self._separate.setdefault(piece.bucket, {})[index] = Separate(param, tensor, where)

    def forget(self, indices: Sequence[int]) -> None:
        """Undo ``extend``."""
        for index in indices:
            piece = self.pieces.pop(index, None)
            self.tensors.pop(index, None)
            if piece is not None:
                self._separate.get(piece.bucket, {}).pop(index, None)
                self._mastered.pop(piece.bucket, None)

    def separate(self, bucket: int) -> list[Separate]:
        """The pieces of a bucket that are tensors of their own."""
        return list(self._separate.get(bucket, {}).values())

    def bind(self) -> None:
        """Point the separate tensors at the memory that the parameters have now."""
        for bucket in self._separate:
            for param, tensor, where in self.separate(bucket):
                tensor.data = span_of(param, where)

    def release_gradients(self) -> None:
        """Take the gradients off the separate tensors."""
        for bucket in self._separate:
            for _, tensor, _ in self.separate(bucket):
                tensor.grad = None
        if self._masters is not None:
            self._masters.release_gradients()

    def mastered(self, bucket: int) -> list[int]:
        """The parameters of a bucket of whose pieces this rank has masters."""
        return self._mastered.get(bucket, [])

    def set_gradient(self, index: int, gradient: Tensor | None) -> None:
        """Give the tensor of a piece its gradient. A master gets it with the next update, cast to float32."""
        if self._masters is not None and index in self._masters:
            self._masters.set_gradient(index, gradient)
        else:
            self.tensors[index].grad = gradient

    def set_gradients(self, indices: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """``set_gradient`` for pieces of one bucket, without a call for each. Dense gradients."""
        if self._masters is not None and indices and indices[0] in self._masters:  # a bucket has them for all, or none
            self._masters.set_gradients(indices, gradients)
            return
        for index, gradient in zip(indices, gradients, strict=True):
            self.tensors[index].grad = gradient

    def gradient(self, index: int) -> Tensor | None:
        """What ``set_gradient`` has set."""
        if self._masters is not None and index in self._masters:
            return self._masters.gradient(index)
        return self.tensors[index].grad

    def gradient_dtype(self, index: int, found: torch.dtype) -> torch.dtype:
        """In which dtype ``set_gradient`` takes a gradient that is there in ``found``."""
        return found if self._masters is not None and index in self._masters else self.tensors[index].dtype


def whole_pieces(params: Mapping[int, Tensor]) -> LocalPieces:
    """The pieces of a rank that is alone and has everything."""
    pieces = LocalPieces(0)
    pieces.pieces = {index: Piece(index, 0, param.numel(), 0, 0, True) for index, param in params.items()}
    pieces.tensors = dict(params)
    return pieces


def flat(param: Tensor) -> Tensor:
    """The elements of a contiguous parameter, 1D, over the same memory and version counter."""
    return param.detach().view(-1)


def span_of(param: Tensor, where: slice | None) -> Tensor:
    """A range of a parameter's elements, or (None) all of it as it is, over the same memory and version counter."""
    return param.detach() if where is None else flat(param)[where]

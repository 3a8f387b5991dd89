"""Gradients as DDP, or the user, leaves them on the parameters: whole, and the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from shardstep.comm.consensus import RankConsensus
from shardstep.grads import clipping
from shardstep.grads.average_check import AverageCheck
from shardstep.grads.norms import local_norm, wide_dtype
from shardstep.grads.source import GradientSource
from shardstep.params.relocation import Relocation
from shardstep.params.sharded_parameters import ShardedParameters

_grad = attrgetter("grad")


class ParameterGradients(GradientSource):
    """``param.grad``. A piece that is its whole parameter has it already; a cut one gets its slice of it."""

    may_be_replaced = True

    def __init__(self, sharded: ShardedParameters, consensus: RankConsensus) -> None:
        self._sharded = sharded
        self._averaged = AverageCheck(consensus)
        self._relocation = Relocation(sharded, consensus)

    def prepare(self, param_groups: Sequence[dict[str, Any]]) -> None:
        self._averaged.look(self._sharded.params.values())

    def bind(self, positions: Iterable[int]) -> None:
        for position in positions:
            for param, tensor, where in self._sharded.pieces.separate(position):
                tensor.grad = param.grad if where is None else _slice(param, where)
            for index in self._sharded.pieces.mastered(position):
                param, piece = self._sharded.params[index], self._sharded.pieces.pieces[index]
                gradient = param.grad if piece.whole else _slice(param, slice(piece.start, piece.stop))
                self._sharded.pieces.set_gradient(index, gradient)

    def follow(self) -> None:
        if self._relocation.is_due:
            self._relocation.agree()
            self._relocation.follow()

    def release(self) -> None:
        self._sharded.pieces.release_gradients()

    def clip(self, params: Sequence[Tensor], max_norm: float, order: float, error_if_nonfinite: bool) -> Tensor:
        gradients = [gradient for gradient in map(_grad, params) if gradient is not None]
        device = params[0].device if params else torch.device("cpu")
        norm = local_norm(gradients, order, device, wide_dtype(params))
        clipping.scale(gradients, norm, max_norm, order, error_if_nonfinite, wide=self._sharded.masters.are_used)
        return norm

    def full(self, index: int) -> Tensor | None:
        return self._sharded.params[index].grad


def _slice(param: Tensor, where: slice) -> Tensor | None:
    gradient = param.grad
    if gradient is None:
        return None
    if gradient.layout is not torch.strided:
        raise RuntimeError(
            f"step expects dense gradients but got {gradient.layout} for a parameter of shape {tuple(param.shape)}. "
            "Make the gradient dense (for an embedding: sparse=False)."
        )
    return gradient.detach().reshape(-1)[where]

"""What an optimizer holds, in bytes, measured on its live tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardstep.params.tensor_subclasses import is_subclass, opened


class _Sizes(NamedTuple):
    parameters: int
    gradients: int
    state: int


class MemoryReport(_Sizes):
    """Bytes that this rank holds, measured on its live tensors.

    A tuple of the first three, as it was before there were masters; the others are attributes only.

    Attributes:
        parameters: of the model, which every rank has whole.
        gradients: those in ``param.grad``; with ``shard_gradients`` this rank's share; with ``shard_ddp_gradients``
            that and DDP's buckets.
        state: of the local optimizer.
        masters: with ``master_weights``: what is kept of the masters between steps.
        scratch: with ``master_weights``: memory that updates use, one bucket after the other. An optimizer whose step
            cannot be split uses it for all at once.
        buffers: with sharded gradients on an accelerator: memory in which buckets are packed, and which is kept:
            ``gradient_buckets_in_flight`` times the largest bucket.
    """

    masters: int = 0
    scratch: int = 0
    buffers: int = 0

    def __new__(
        cls, parameters: int, gradients: int, state: int, masters: int = 0, scratch: int = 0, buffers: int = 0
    ) -> MemoryReport:
        report = super().__new__(cls, parameters, gradients, state)
        report.masters, report.scratch, report.buffers = masters, scratch, buffers
        return report

    @property
    def total(self) -> int:
        """All six. (The sum of the tuple lacks the last three.)"""
        return sum(self) + self.masters + self.scratch + self.buffers

    def __repr__(self) -> str:
        others = f"masters={self.masters}, scratch={self.scratch}, buffers={self.buffers}"
        return f"{super().__repr__()[:-1]}, {others})"

    def __getnewargs__(self) -> tuple[int, ...]:
        return (*self, self.masters, self.scratch, self.buffers)


def measure(
    params: Iterable[Tensor],
    state: Mapping[Any, Any],
    sharded: Sequence[Tensor],
    masters: Sequence[Tensor] = (),
    scratch: Sequence[Tensor] = (),
    buffers: Sequence[Tensor] = (),
) -> MemoryReport:
    """Bytes of distinct memory behind parameters, their gradients, the state of the local optimizer, masters, buffers.

    ``sharded``: gradients that are not on the parameters. (A sharded gradient there has no memory of its own.)
    """
    params = list(params)
    gradients = [param.grad for param in params if type(param.grad) is Tensor]
    gradients += sharded
    kinds = (params, gradients, _tensors(dict(state)), masters, scratch, buffers)
    return MemoryReport(*map(_bytes, kinds))


def _bytes(tensors: Iterable[Tensor]) -> int:
    sizes: dict[tuple[torch.device, int], int] = {}
    for tensor in tensors:
        key = tensor.device, tensor.data_ptr()
        sizes[key] = max(sizes.get(key, 0), tensor.nbytes)
    return sum(sizes.values())


def _tensors(value: Any) -> list[Tensor]:
    if is_subclass(value):  # its own size is that of the tensor it represents
        value = opened(value)
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []

"""Parameters that are DTensors, replicated over every dimension of their mesh: taken as the plain tensors they are.

torch's ``replicate`` makes such parameters, and averages their gradients. Inside this package a ``LocalParameter``
stands for each: it has the memory of the DTensor's local tensor, and its gradient. Users see their own DTensors.
A DTensor is told by what it has, so that nothing of torch.distributed.tensor is imported for those who have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

# Without torch's public ``to_local``, which records an operation for autograd.
_local = attrgetter("_local_tensor")
_local_of_stand_in = attrgetter("_dtensor._local_tensor")


def is_dtensor(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def plain_tensor(tensor: Tensor) -> Tensor:
    """A tensor without the DTensor around it, over the same memory, if it has one and is replicated."""
    if not is_dtensor(tensor):
        return tensor
    check_replicated(tensor, "shardstep")
    local = _local(tensor)
    # What is still on its way from a collective is waited for.
    return local.wait() if hasattr(local, "wait") else local


def check_replicated(tensor: Any, what: str) -> None:
    """ValueError, which names the placements, for a DTensor of which ranks hold different parts."""
    if is_dtensor(tensor) and not all(placement.is_replicate() for placement in tensor.placements):
        raise ValueError(
            f"{what} expects plain tensors, or DTensors with Replicate() on every dimension of their mesh, but got a "
            f"DTensor with the placements {tuple(tensor.placements)}. For parameters that are sharded already use the "
            "plain optimizer; for a plain tensor pass param.to_local()."
        )


class LocalParameter(Parameter):
    """Stands for a replicated DTensor: its local tensor, with the DTensor's gradient and ``requires_grad``."""

    _dtensor: Any

    @staticmethod
    def __new__(cls, dtensor: Any) -> LocalParameter:
        local = torch.Tensor._make_subclass(cls, plain_tensor(dtensor).detach(), False)
        local._dtensor = dtensor
        return local

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        gradient = self._dtensor.grad
        if gradient is None:
            return None
        check_replicated(gradient, "step, of the gradient of a DTensor,")
        return plain_tensor(gradient)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self._dtensor.requires_grad

    def follow(self) -> None:
        """Have the memory that the DTensor has now."""
        self.data = plain_tensor(self._dtensor).detach()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise RuntimeError(
            "a copy expects an optimizer over plain tensors, but this one has DTensors. Copy its state dict instead."
        )

    def __reduce_ex__(self, proto: Any) -> NoReturn:
        return self.__deepcopy__({})


def local_parameter(param: Tensor, plain_only: str) -> Tensor:
    """What stands for a parameter inside this package: the parameter itself, unless it is a DTensor.

    ValueError for one if ``plain_only`` names an argument that goes with plain tensors only.
    """
    if not is_dtensor(param):
        return param
    if plain_only:
        raise ValueError(
            f"{plain_only}=True expects plain tensors but got a DTensor with the placements {tuple(param.placements)}, "  # type: ignore[attr-defined]
            f"whose memory and gradient are torch's. Drop {plain_only}."
        )
    return LocalParameter(param)


def have_moved(params: Sequence[LocalParameter]) -> bool:
    """Whether any of the DTensors has other memory now. Passes in C: it runs in every step."""
    return list(map(Tensor.data_ptr, map(_local_of_stand_in, params))) != list(map(Tensor.data_ptr, params))

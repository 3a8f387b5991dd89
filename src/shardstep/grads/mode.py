"""How an optimizer comes by its gradients: the arguments about it, checked together, and the source they ask for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardstep.comm.consensus import RankConsensus
from shardstep.grads.attendance import Attendance
from shardstep.grads.ddp_buckets import DdpBucketGradients
from shardstep.grads.parameter_gradients import ParameterGradients
from shardstep.grads.reduced_gradients import ReducedGradients
from shardstep.grads.settings import ReduceSettings
from shardstep.grads.source import GradientSource
from shardstep.params.sharded_parameters import ShardedParameters


def check_flags(**flags: Any) -> None:
    """TypeError if one is no bool: "no" would count as True."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} expects a bool but got {value!r}. Pass True or False.")


@dataclass(frozen=True)
class GradientMode:
    """Who reduces the gradients, and whether a step may end before its gathers."""

    shard_gradients: bool
    overlap_with_ddp: bool
    lazy_gather: bool
    broadcast_parameters: bool
    reduce: ReduceSettings

    @property
    def needs_own_tensors(self) -> bool:
        """Whether pieces need tensors of their own because ``param.grad`` is not theirs."""
        return self.shard_gradients or self.overlap_with_ddp

    @property
    def needs_plain_tensors(self) -> str:
        """The argument because of which parameters may be no DTensors; empty: they may."""
        wishes = {name: getattr(self, name) for name in ("shard_gradients", "overlap_with_ddp", "lazy_gather")}
        return next((name for name, wished in wishes.items() if wished), "")

    def check(self) -> None:
        """ValueError if the arguments do not go together."""
        if self.shard_gradients and self.overlap_with_ddp:
            raise ValueError(
                "shard_gradients=True and overlap_with_ddp=True exclude each other: in the first the optimizer reduces "
                "the gradients, in the second DDP does. Drop one of them."
            )
        if self.lazy_gather and self.overlap_with_ddp:
            raise ValueError(
                "lazy_gather=True and overlap_with_ddp=True exclude each other: a DDP hook gathers the parameters "
                "within backward. Drop one of them."
            )
        if not self.shard_gradients and (self.reduce != ReduceSettings() or not self.broadcast_parameters):
            raise ValueError(
                "reduce_dtype, gradient_buckets_in_flight, overlap_backward, find_unused_parameters and "
                "broadcast_parameters=False expect an optimizer that reduces the gradients itself. Add "
                "shard_gradients=True, or drop them."
            )
        self.reduce.check()

    def check_params(self, params: Iterable[Tensor]) -> None:
        """An error if gradients of these parameters cannot be reduced in this mode."""
        if self.shard_gradients:
            self.reduce.check_params(list(params))

    def facts(self) -> dict[str, str]:
        """What must be the same on every rank."""
        return {
            "shard_gradients": str(self.shard_gradients),
            "overlap_with_ddp": str(self.overlap_with_ddp),
            **self.reduce.facts(),
            "broadcast_parameters": str(self.broadcast_parameters),
            "lazy_gather": str(self.lazy_gather),
        }

    def source(self, sharded: ShardedParameters, consensus: RankConsensus, attendance: Attendance) -> GradientSource:
        """The source of gradients for this mode."""
        if self.shard_gradients:
            return ReducedGradients(sharded, consensus, self.reduce, attendance, self.broadcast_parameters)
        kind = DdpBucketGradients if self.overlap_with_ddp else ParameterGradients
        return kind(sharded, consensus)

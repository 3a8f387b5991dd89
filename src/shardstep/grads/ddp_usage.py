"""Which parameters were used in an iteration, here and elsewhere, for the hooks of ``ddp_hooks.py``.

DDP with ``find_unused_parameters`` or ``static_graph`` finds out too, but does not tell in time.

[Note: once per iteration]
On the CPU the ranks tell each other with every bucket of DDP's. On an accelerator that would make the host wait inside
backward each time. There they exchange once, when DDP's last bucket has come, and step then: an interleaved hook has
nothing to interleave. It goes through the CPU's backend if the group has one, so that no host waits for a device; else
over the device, on a stream that waits for no computation, and is read once. With ``static_graph`` the first iteration
answers for all that follow, in which nothing is exchanged and the hooks interleave as always.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardstep.comm import collectives
from shardstep.comm.process_group import Group
from shardstep.comm.streams import SideStreams
from shardstep.grads.gradient_hooks import GradientHooks
from shardstep.params.sharded_parameters import ShardedParameters


class ParameterUsage:
    """Of one hook. Asked with every bucket that DDP has reduced."""

    is_known = True  # whether ``gradients`` can be asked now, bucket by bucket

    def __init__(self, sharded: ShardedParameters, group: Group, as_view: bool) -> None:
        """``group``: the ranks that DDP reduces over. ``as_view``: whether its gradients are views of its buckets."""
        self._sharded = sharded
        self._group = group
        self._as_view = as_view
        self._here: set[int] = set()
        self._hooks = GradientHooks(self, ParameterUsage._note)

    def extend(self) -> None:
        """Also of parameters that were added."""
        self._hooks.extend(self._sharded.params)

    def _note(self, index: int, param: Tensor) -> None:
        self._here.add(index)

    def find_out(self) -> None:
        """Collective. DDP's last bucket is there: from now on ``gradients`` can be asked."""

    def forget(self) -> None:
        """The iteration is over."""
        self._here.clear()

    def gradients(self, found: Sequence[tuple[int, Tensor, Tensor]]) -> list[tuple[int, Tensor | None]]:
        """Collective. The gradients to step with, for (index, parameter, reduced gradient).

        A parameter that no rank has used keeps the gradient that it has, as in DDP: usually none.
        """
        used = self._used([index for index, _, _ in found]) if found else []
        return [
            (index, reduced if is_used or (self._as_view and param.grad is not None) else param.grad)
            for (index, param, reduced), is_used in zip(found, used, strict=True)
        ]

    def _used(self, indices: Sequence[int]) -> list[bool]:
        here = [int(index in self._here) for index in indices]
        return list(map(any, zip(*collectives.all_gather_ints(self._group, here), strict=True)))


class UsageOfIteration(ParameterUsage):
    """On accelerators. See [Note: once per iteration]."""

    def __init__(self, sharded: ShardedParameters, group: Group, as_view: bool, *, is_static: bool) -> None:
        super().__init__(sharded, group, as_view)
        self._is_static = is_static
        self._anywhere: dict[int, bool] | None = None  # by parameter: whether any rank has used it
        self._streams = SideStreams()

    @property
    def is_known(self) -> bool:  # type: ignore[override]
        return self._anywhere is not None and self._anywhere.keys() == self._sharded.params.keys()

    def find_out(self) -> None:
        if self.is_known:
            return
        indices = list(self._sharded.params)
        here = torch.tensor([index in self._here for index in indices], dtype=torch.int32)
        wire = self._group.wire_device
        with self._streams.of(wire).current():
            counts = here.to(wire, non_blocking=True)
            if self._group.world_size > 1:
                collectives.sum_natively(self._group, counts).wait()
            self._anywhere = dict(zip(indices, map(bool, counts.tolist()), strict=True))

    def forget(self) -> None:
        super().forget()
        if not self._is_static:
            self._anywhere = None

    def _used(self, indices: Sequence[int]) -> list[bool]:
        assert self._anywhere is not None, "it was not found out yet"
        return [self._anywhere[index] for index in indices]

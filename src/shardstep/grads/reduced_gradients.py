"""Gradients that the optimizer reduces itself, during backward, and keeps this rank's share of (ZeRO-2).

Three parts: the scheduler decides during backward what is sent when, the reducer has it under way, the shards are what
arrived. This is the front of them: what a step, a user or ``param.grad`` asks for, it completes first.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardstep.comm import collectives
from shardstep.comm.checked_gather import CheckedGather
from shardstep.comm.consensus import RankConsensus
from shardstep.comm.process_group import open_side_group
from shardstep.grads import clipping
from shardstep.grads.attendance import Activity, Attendance, Call, Roll
from shardstep.grads.hooked_scheduler import HookedScheduler
from shardstep.grads.norm_exchange import NormExchange
from shardstep.grads.norms import norm_over_ranks, wide_dtype
from shardstep.grads.reducer import GradientReducer
from shardstep.grads.scheduler import BackwardScheduler
from shardstep.grads.settings import ReduceSettings
from shardstep.grads.shards import GradientShards
from shardstep.grads.source import GradientSource
from shardstep.params.relocation import Relocation
from shardstep.params.sharded_parameters import ShardedParameters


class ReducedGradients(GradientSource):
    """Sharded gradients. Also the owner of every ``ShardedGradient`` (see there)."""

    calls_roll = True
    reduces_in_ddp = False

    def __init__(
        self,
        sharded: ShardedParameters,
        consensus: RankConsensus,
        settings: ReduceSettings,
        attendance: Attendance,
        broadcasts: bool,
    ) -> None:
        """Collective: reductions have a process group of their own, so that they block no other collectives."""
        self._sharded = sharded
        self._group, self._everyone = sharded.group, sharded.ranks.everyone
        self._consensus = consensus
        self._attendance = attendance
        self._broadcasts = broadcasts  # parameters start as rank 0 has them
        self._settings = settings
        # What is read is read within the shard group, where all of it is. So there the ranks compare who has asked.
        inside = consensus if sharded.ranks.replicate is None else RankConsensus(sharded.group, "inside")
        self._ranks = CheckedGather(sharded.group, inside)
        # DDP keeps its buckets: memory that is given back between iterations would be mapped page by page every time.
        self._shards = GradientShards(sharded, settings.reduce_dtype, keep_memory=self.reduces_in_ddp)
        self._reducer = GradientReducer(sharded, self._shards, open_side_group(sharded.group), consensus, settings)
        self._norms = NormExchange(self._ranks)
        self._changes = 0  # how often reduced gradients were changed in place, added to, or forgotten
        self._wide = torch.float32  # in which norms are added up
        self._scheduler = self._make_scheduler()

    def _make_scheduler(self) -> BackwardScheduler:
        return HookedScheduler(*self._parts)

    @property
    def _parts(self) -> tuple[Any, ...]:
        """Of a scheduler."""
        relocation = Relocation(self._sharded, self._consensus)
        return self._sharded, self._shards, self._reducer, self._settings, self._attendance, relocation

    # --- for the engine -------------------------------------------------------------------------------------------

    def bind(self, positions: Iterable[int]) -> None:
        self.complete()
        for position in positions:
            self._shards.bind(position)

    def release(self) -> None:
        self._shards.release()

    def stepped(self) -> None:
        self._scheduler.stepped()

    def extend(self) -> None:
        if self._shards.buckets:
            self._scheduler.throw_leftovers_away()
        self._wide = wide_dtype(self._sharded.params.values())
        self._shards.extend(weakref.proxy(self))
        self._scheduler.extend()

    def follow(self) -> None:
        if self._scheduler.follow():
            self.changed()

    def adopt(self, params: Sequence[Tensor]) -> None:
        if self._broadcasts:
            collectives.copy_from_rank_0(self._everyone, params)

    # --- for the user ---------------------------------------------------------------------------------------------

    @contextmanager
    def cleared(self, set_to_none: bool) -> Iterator[None]:
        exposed = self._shards.hide()
        yield
        self._scheduler.clear(keep=[] if set_to_none else exposed)
        self.changed()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._scheduler.syncs = self._scheduler.syncs, False
        try:
            yield
        finally:
            self._scheduler.syncs = before

    def clip(self, params: Sequence[Tensor], max_norm: float, order: float, error_if_nonfinite: bool) -> Tensor:
        self.complete()
        self._attendance.announce_clipping(max_norm, order)
        return self._clip(params, max_norm, order, error_if_nonfinite)

    def _clip(self, params: Sequence[Tensor], max_norm: float, order: float, error_if_nonfinite: bool) -> Tensor:
        gradients = self._shards.tensors()
        device = params[0].device if params else torch.device("cpu")
        norm = norm_over_ranks(self._ranks, "clip_grad_norm_", gradients, order, device, wide_dtype(params))
        clipping.scale(gradients, norm, max_norm, order, error_if_nonfinite, wide=self._sharded.masters.are_used)
        self.changed()
        return norm

    def full(self, index: int) -> Tensor | None:
        label = self._sharded.layout.spec_of[index].label
        self._consensus.check_equal("full_grad", [("argument", {"param": label})])
        self.complete()
        if not self._shards.has(index):
            return None
        param, owned = self._sharded.params[index], self._sharded.layout.pieces_of(index)
        longest = max((piece.numel for _, piece in owned), default=0)
        row = torch.zeros(longest, dtype=self._shards.dtype_of(index), device=param.device)
        local = self._shards.local(index)
        if local is not None:
            row[: local.numel()] = local
        if len(owned) == 1:
            collectives.broadcast(self._group, row, owned[0][0])
            return row.view(param.shape)
        rows = collectives.all_gather_rows(self._group, row.view(torch.uint8)).view(row.dtype)
        return torch.cat([rows[rank, : piece.numel] for rank, piece in owned] or [row]).view(param.shape)

    def tensors(self) -> list[Tensor]:
        self._reducer.join()  # shards without gradients that somebody took off the parameters become zero
        return [*self._shards.memory(), *self._reducer.tensors()]

    def buffers(self) -> list[Tensor]:
        return self._reducer.buffers()

    def check_params(self, params: Iterable[Tensor]) -> None:
        self._settings.check_params(list(params))

    # --- for ShardedGradient --------------------------------------------------------------------------------------

    def complete(self) -> None:
        """Collective. Reduce what has not been reduced yet."""
        self.follow()
        self._scheduler.complete()

    def settle(self) -> None:
        """Collective. Bring in what is under way."""
        self._scheduler.settle()

    def check_all_present(self, what: str) -> None:
        """RuntimeError if ranks may be without inputs: nobody would tell them."""
        if self._attendance.may_be_incomplete:
            raise RuntimeError(
                f"{what} is not available in a Join context: a rank that has joined is not asked. Use "
                "optimizer.clip_grad_norm_ to clip."
            )

    def changed(self) -> None:
        """A reduced gradient was changed in place, or something is to be added to it."""
        self._changes += 1

    def displaced(self, index: int, by: Tensor) -> None:
        """DDP puts a view of its new bucket in the place of a sharded gradient."""
        self._shards.displace(index, by)

    def local(self, index: int) -> Tensor | None:
        """This rank's piece of a parameter's reduced gradient, 1D; None if it owns no piece of it."""
        return self._shards.local(index)

    def norm_of(self, index: int, order: float, dtype: torch.dtype) -> Tensor:
        """Collective. The norm of a parameter's whole gradient, 0-dim."""
        self.check_all_present("the norm of a sharded gradient")
        wide = torch.float64 if dtype.to_real() == torch.float64 else self._wide
        self.settle()
        if self._norms.known(self._state, index, order, wide) is None:
            self.complete()
            what = f"the norm of the gradient of {self._sharded.layout.spec_of[index].label}"
            like = torch.empty(0, dtype=wide, device=self._shards.stand_in(index).device)
            self._norms.exchange(what, self._state, self._sharded.layout, self._shards.local, order, like)
        norm = self._norms.known(self._state, index, order, wide)
        assert norm is not None, "it was exchanged"
        return norm.to(self._shards.stand_in(index).device, dtype)

    @property
    def _state(self) -> tuple[int, int]:
        """Another one after every backward, also in DDP's ``no_sync``, reduction, scaling and ``zero_grad``."""
        return self._reducer.sent, self._changes

    def unscale(self, like: Tensor, found_inf: Tensor, inverse_scale: Tensor) -> None:
        """Collective. Multiply all shards of ``like``'s device and dtype; tell every rank if any has an inf or nan."""
        self.complete()
        if self._attendance.is_uneven:
            self._attendance.announce_unscaling(float(inverse_scale), self._shards.index_of(like))
        self._unscale(like, found_inf, inverse_scale)

    def _unscale(self, like: Tensor, found_inf: Tensor, inverse_scale: Tensor) -> None:
        # All shards of this kind, not only those asked for: a rank may not have known of gradients that others had.
        shards = self._shards.tensors(like)
        if shards:
            torch._amp_foreach_non_finite_check_and_unscale_(shards, found_inf, inverse_scale)
        found = self._ranks.gather("unscaling the gradients (GradScaler)", found_inf.view(()))
        found_inf.copy_(found.amax().view_as(found_inf))
        self.changed()

    # --- for ranks without inputs ---------------------------------------------------------------------------------

    @property
    def sent(self) -> int:
        return self._reducer.sent

    def take_part(self, call: Call, roll: Roll, params: Sequence[Tensor]) -> None:
        first, second = call.arguments
        if call.kind == Activity.ROUND:
            self._scheduler.shadow(roll)
            return
        self._reducer.settle()  # what the round has brought is read now
        if call.kind == Activity.CLIP:
            self._clip(params, first, second, error_if_nonfinite=False)
        else:
            like = self._sharded.params[int(second)]
            scale = torch.tensor(first, dtype=torch.float32, device=like.device)
            self._unscale(like, torch.zeros(1, dtype=torch.float32, device=like.device), scale)

    def leave_join(self) -> None:
        # After different numbers of iterations: all count on from the same one.
        iteration = self._reducer.iteration
        numbers = collectives.all_gather_ints(self._everyone, [iteration.number])
        iteration.number = max(row[0] for row in numbers)

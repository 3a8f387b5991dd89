"""ZeroRedundancyOptimizer: the contract of torch.optim.Optimizer and Joinable over a sharded optimizer."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from shardstep import join
from shardstep.comm import collectives
from shardstep.comm.consensus import Board
from shardstep.comm.reads import Reads
from shardstep.engine import GatherFailed, Gathers, gather, update_and_gather
from shardstep.grads import clipping
from shardstep.grads.scheduler import Meeting, ReduceSettings, Rounds
from shardstep.grads.shards import GradientShards
from shardstep.layout.specs import Layout
from shardstep.params import groups, replicas
from shardstep.params.lazy_gather import LazyGathers
from shardstep.params.local_optimizer import copy_options
from shardstep.params.sharded_parameters import Placement
from shardstep.state import memory
from shardstep.state.memory import MemoryReport
from shardstep.state.state_dicts import ShardedState
from shardstep.state.status import Status

logger = logging.getLogger(__name__)


class ZeroRedundancyOptimizer(ShardedState, Joinable):
    """Wraps any optimizer and shards its state over the ranks of a process group (ZeRO-1, ZeRO-2).

    Takes the arguments of ``torch.distributed.optim.ZeroRedundancyOptimizer``; changing the import is the whole
    migration. Gradients must be the same on all ranks when ``step`` is called, as DDP leaves them; or, with
    ``shard_gradients=True``, the model is not wrapped and the optimizer reduces them itself. A step is

    1. *reduce*: with ``shard_gradients`` bring in what backward has sent; else nothing, DDP has reduced the gradients;
    2. *update*: the local optimizer steps this rank's pieces, bucket by bucket if it may be split;
    3. *gather*: each bucket's shards go to all ranks while the next bucket is updated.

    Building one is collective: every rank of the group builds it, with the same parameters and options.

    Args:
        params: everything that torch.optim takes: tensors, (name, tensor) pairs, dicts of groups. A group may carry
            ``"shard"`` to choose for itself.
        optimizer_class: the class of the local optimizer.
        process_group: the ranks to shard over (default: all).
        parameters_as_bucket_view: make the parameters views of one buffer per bucket, so that nothing is packed.
        overlap_with_ddp: step inside DDP's backward: see ``hook_with_zero_step``.
        shard: "element" cuts parameters anywhere and gives every rank exactly its share; "tensor" keeps them whole;
            "auto" asks the optimizer, by stepping tiny tensors, whether it may be cut.
        bucket_cap_mb: the size of a bucket, in MiB.
        shard_gradients: reduce the gradients during backward and keep this rank's share only (ZeRO-2). The model must
            not be wrapped in DDP. ``param.grad`` is then a ``ShardedGradient``; see ``full_grad``, ``clip_grad_norm_``,
            ``no_sync``.
        broadcast_parameters: with ``shard_gradients``: start from rank 0's parameters.
        reduce_dtype: with ``shard_gradients``: in which dtype gradients travel, are summed and kept until the step.
        gradient_buckets_in_flight: with ``shard_gradients``: how many buckets may be under way at once.
        overlap_backward: with ``shard_gradients``: False reduces at the end of backward instead of during it.
        lazy_gather: end a step while the last parameters still travel; the next forward waits for each when it needs
            it, and so does everybody else who touches one.
        find_unused_parameters: with ``shard_gradients`` on accelerators: parameters may be unused in a backward. (On
            the CPU they always may.)
        **defaults: given to ``optimizer_class``.

    Example::

        model = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)
        model(batch).sum().backward()
        optimizer.step()
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., Optimizer],
        process_group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        shard: str = "auto",
        bucket_cap_mb: float = 25,
        shard_gradients: bool = False,
        broadcast_parameters: bool = True,
        reduce_dtype: torch.dtype | None = None,
        gradient_buckets_in_flight: int = 2,
        overlap_backward: bool = True,
        find_unused_parameters: bool = False,
        lazy_gather: bool = False,
        **defaults: Any,
    ) -> None:
        self._placement: Placement | None = None  # None while torch's constructor adds the groups one by one
        self._meeting_place: Board | None = None
        with self._undone_everywhere("ZeroRedundancyOptimizer", process_group):
            settings = ReduceSettings(
                reduce_dtype, gradient_buckets_in_flight, overlap_backward, find_unused_parameters
            )
            settings.check(shard_gradients, overlap_with_ddp)
            if lazy_gather and overlap_with_ddp:
                raise ValueError(
                    "lazy_gather=True and overlap_with_ddp=True exclude each other: a DDP hook gathers the parameters "
                    "within backward. Drop one of them."
                )
            new_groups = groups.normalize(params)
            granularities = [groups.take_granularity(group, shard) for group in new_groups]
            groups.name_empty_groups(new_groups)
            given = [dict(group) for group in new_groups]
            Optimizer.__init__(self, new_groups, dict(defaults))
            Joinable.__init__(self)
            self._group = collectives.open_group(process_group)
            self._meeting_place = Board(self._group)
            placement = Placement(
                self._group,
                optimizer_class,
                defaults,
                shard,
                bucket_cap_mb,
                views=bool(parameters_as_bucket_view),
                apart=shard_gradients or overlap_with_ddp,
                reduce_dtype=reduce_dtype,
            )
            self.optim = placement.build(self.param_groups, granularities, given)
            if shard_gradients:
                groups.check_not_in_ddp(placement.params.values())
                settings.check_params(placement.params.values())
        self._placement = placement
        self.process_group = self._group.process_group
        self.world_size = self._group.world_size
        self.rank = self._group.rank
        self.global_rank = self._group.global_rank
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.initialized = True
        self.defaults = self.optim.defaults
        copy_options(self.optim.param_groups, self.param_groups, self._placed.notes)
        mode = {"shard_gradients": str(shard_gradients), "overlap_with_ddp": str(overlap_with_ddp), **settings.facts()}
        mode |= {"broadcast_parameters": str(broadcast_parameters), "lazy_gather": str(lazy_gather)}
        self._board.agree("ZeroRedundancyOptimizer", placement.facts(self.param_groups, mode))
        self._overlap_with_ddp = overlap_with_ddp
        self._reduces = settings
        self._when_extended: list[Callable[[], None]] = []
        self._broadcasts = shard_gradients and broadcast_parameters
        side = collectives.open_side_group(self._group) if shard_gradients or overlap_with_ddp else self._group
        if overlap_with_ddp:
            placement.gather_through(side)
        if self._broadcasts:
            collectives.copy_from_rank_0(self._group, list(placement.params.values()))
        placement.settle()
        self._gradients: GradientShards | None = None
        self._rounds: Rounds | None = None
        if shard_gradients:
            self._gradients, self._rounds = self._reduce_gradients(side, settings)
        self._lazy_gather = lazy_gather
        self._status = Status()
        self._expose_state()
        if collectives.debug_is_on():
            logger.info("rank %d of %d: %s", self.rank, self.world_size, memory.layout_text(placement.layout))

    # --- step -----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's pieces and gather the parameters.

        Collective: call on every rank of the group. ``closure`` is run on each rank; ``kwargs`` go to the local
        optimizer's step. Returns what that returns. With a DDP hook the step has been made when backward is over: then
        this only runs the closure, if there is one.
        """
        if self._status.steps_in_backward:
            loss = closure() if callable(closure) else None
            self._take_gradients()
            return loss
        if self._rounds is None or not callable(closure):  # else the closure's backward does it first
            Join.notify_join_context(self)
        return self._step(closure, kwargs)

    def _step(
        self, closure: Callable[[], Any] | None, kwargs: dict[str, Any], everyone: list[join.Call] | None = None
    ) -> Any:
        """``everyone``: in the shadow step of a rank that has joined, what the ranks do (see join.py)."""
        placement = self._placed
        self._begin_step()
        if everyone is None and closure is None:
            with self._undone_everywhere("step"):
                placement.check_still_trained()
        # With a closure the gradients to lend are those it leaves behind: see _sharded.
        borrowed = self._lend(everyone) if self._join_config.enable and not callable(closure) else None
        copy_options(self.param_groups, self.optim.param_groups)
        if borrowed is None:
            with self._own_gradients():
                evaluate = self._sharded(closure) if callable(closure) else closure
                loss = self._update_and_gather(evaluate, kwargs)
        else:
            with join.borrowed_gradients(placement.shard.tensors, borrowed):
                loss = self._update_and_gather(None, {})
        copy_options(self.optim.param_groups, self.param_groups, self._placed.notes)
        self._end_step()
        self._take_gradients()
        return loss

    def _update_and_gather(self, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        placement, gathers = self._placed, self._new_gathers()
        lazily = self._lazy_gather and closure is None
        loss = update_and_gather(placement, self.optim, gathers, self._board, closure, kwargs, lazily)
        if gathers.in_flight:
            self._status.lazy = LazyGathers(gathers, placement.params_of)
        return loss

    def _new_gathers(self) -> Gathers:
        me = weakref.proxy(self)  # lazy gathers are kept in our status
        return Gathers(self._placed, self._board, lambda error: me._note_failed_gather(error))

    def wait_for_parameters(self) -> None:
        """With ``lazy_gather``: finish the gathers that are still under way.

        Touching a parameter does so by itself. A model compiled with ``torch.compile`` looks at parameters without
        touching them: call this before its forward.
        """
        lazy, self._status.lazy = self._status.lazy, None
        if lazy is not None:
            lazy.finish()

    def _note_failed_gather(self, error: GatherFailed) -> None:
        self._status.gather_failed, self._status.failure = True, str(error)

    def _begin_step(self) -> None:
        self._check_last_step()
        self.wait_for_parameters()
        self._notice_changes()
        self._status.changed()
        self._status.failure = "it did not end"

    def _end_step(self) -> None:
        self._status.failure = ""
        if self._rounds is not None:
            self._rounds.stepped()

    def _take_gradients(self) -> None:
        """Some optimizers (heavyball's) set the gradients they have used to None, here those of this rank's pieces."""
        if self._placed.consumes:
            self.zero_grad()

    def _check_last_step(self) -> None:
        """After a step that failed: did the others fail with us, at the same place? Then it can go on."""
        if self._status.gather_failed:
            raise RuntimeError(
                "step expects a process group in which all ranks are at the same place, but an earlier step failed "
                f"({self._status.failure}). Start the processes again, from a checkpoint."
            )
        if self._status.failure:
            self._board.agree("step (the previous one failed)", [("exchanges", {"started": str(self._placed.started)})])

    def _sharded(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure for the local optimizer: its pieces get their slices of the gradients it computes."""
        lends = self._join_config.enable

        def evaluate() -> Any:
            nonlocal lends
            if self._placed.moves_first:  # each rank has moved its pieces: the closure is about all of them
                gather(self._placed, self._new_gathers())
            loss = closure()
            if lends:
                if self._rounds is not None:
                    Join.notify_join_context(self)
                self._lend()
                lends = False
            self._bind_gradients()
            return loss

        return evaluate

    @contextmanager
    def _own_gradients(self) -> Iterator[None]:
        self._bind_gradients()
        try:
            yield
        finally:
            self._placed.shard.release_gradients()

    def _bind_gradients(self) -> None:
        (self._placed.shard if self._gradients is None else self._gradients).bind_gradients()

    def _notice_changes(self) -> None:
        """Parameters that were frozen, unfrozen or given other memory since the last step."""
        placement = self._placed
        active = placement.active_now()
        if active != placement.active:
            self._board.note(placement.describe_change(active))
            self._board.agree("step, after a change of requires_grad", placement.activity_facts(active))
            placement.activate(active)
        with self._undone_everywhere("step"):
            if placement.moved():
                placement.bind()

    def _lend(self, everyone: list[join.Call] | None = None) -> dict[int, Tensor] | None:
        everyone = everyone or join.meet(self._group, join.Call(join.STEP))
        lending, placement = join.Lending.among(everyone), self._placed
        return join.lend(
            self._group,
            lending,
            placement.layout,
            placement.params,
            self.param_groups,
            gradients=self._gradients is None,
        )

    # --- gradients ------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients (or set them to zero).

        With ``shard_gradients`` also what is still under way: after an exception in forward or backward, call it on
        every rank and go on with the next batch.
        """
        if self._gradients is None:
            super().zero_grad(set_to_none)
            return
        exposed = self._gradients.hide()
        super().zero_grad(set_to_none)
        self._reducing("zero_grad").clear(keep=[] if set_to_none else exposed)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """With ``shard_gradients``: within this context backward adds to local gradients and sends nothing.

        The first backward after it reduces the sum. Full gradients are held meanwhile.
        """
        rounds = self._reducing("no_sync")
        before, rounds.sync = rounds.sync, False
        try:
            yield
        finally:
            rounds.sync = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale the gradients so that the norm of all of them together is at most ``max_norm``.

        Returns the norm as it was, 0-dim, the same bits on every rank. Collective with ``shard_gradients``: call on
        every rank of the group.
        """
        if self._status.has_hook:
            raise RuntimeError(
                "clip_grad_norm_ expects gradients that were not used yet, but with a DDP hook the step is made during "
                "backward. Drop overlap_with_ddp to clip."
            )
        return clipping.clip(
            self._all_params,
            self._gradients,
            max_norm,
            norm_type,
            error_if_nonfinite,
            lambda limit, order: self._announce(join.CLIP, limit, order),
        )

    def full_grad(self, param: Tensor) -> Tensor | None:
        """The whole reduced gradient of one parameter, on every rank; None if it has none.

        Collective with ``shard_gradients``: call on every rank of the group, with the same parameter.
        """
        index = self._index_of(param, "full_grad")
        if self._gradients is None:
            return param.grad
        self._board.agree("full_grad", [("argument", {"param": self._placed.layout.spec_of[index].label})])
        return self._gradients.full(index)

    def broadcast_buffers(self, model: torch.nn.Module) -> None:
        """Give all ranks rank 0's buffers (the running statistics of BatchNorm), as DDP does before every forward.

        Collective: call on every rank of the group. Without DDP nobody else does.
        """
        if self._join_config.enable:
            raise RuntimeError(
                "broadcast_buffers expects all ranks to call it, but in a Join context some may have run out of "
                "inputs. Call it before or after."
            )
        try:
            collectives.copy_from_rank_0(self._group, list(model.buffers()))
        except RuntimeError as error:
            raise RuntimeError(self._board.absence("broadcast_buffers", error)) from error

    def _reduce_gradients(self, side: collectives.Group, settings: ReduceSettings) -> tuple[GradientShards, Rounds]:
        shards = GradientShards(self._placed, self._group, side, Reads(self._group, self._board), settings.reduce_dtype)
        me = weakref.proxy(self)
        rounds = Rounds(shards, self._board, settings, lambda given_up, sent: me._meet_for_round(given_up, sent))
        bound = weakref.proxy(rounds)
        shards.bring_in = lambda: bound.complete()
        return shards, rounds

    def _reducing(self, call: str) -> Rounds:
        if self._rounds is None:
            raise RuntimeError(
                f"{call} expects an optimizer that reduces the gradients itself. Use shard_gradients=True, or "
                f"{call} of DDP."
            )
        return self._rounds

    def _meet_for_round(self, given_up: bool, sent: int) -> Meeting:
        """Before gradients are reduced: is everybody there? Called on ranks that have inputs."""
        Join.notify_join_context(self)
        assert self._gradients is not None
        if not self._join_config.enable:
            self._gradients.announce_unscaling = None
            if not given_up:
                return Meeting(self.world_size)
            sent_by_all = [row[0] for row in collectives.all_gather_ints(self._group, [sent])]
            return Meeting(self.world_size, most_sent=max(sent_by_all))
        me = weakref.proxy(self)
        self._gradients.announce_unscaling = lambda scale, index: me._announce(join.UNSCALE, scale, index)
        epoch = self._reducing("backward").epoch
        return self._meeting_of(join.meet(self._group, join.Call(join.ROUND, epoch, given_up, sent)))

    def _announce(self, kind: int, first: float, second: float) -> None:
        """In a Join context: have the ranks that joined take part in a collective that is no step or round."""
        if self._join_config.enable:
            Join.notify_join_context(self)
            join.meet(self._group, join.Call.of(kind, first, second))

    def _meeting_of(self, everyone: list[join.Call]) -> Meeting:
        active = sum(call.kind != join.JOINED for call in everyone)
        most_sent = max(call.sent for call in everyone) if any(call.given_up for call in everyone) else None
        epoch = max(call.epoch for call in everyone)
        return Meeting(self.world_size if self._status.divide_by_initial_world_size else active, epoch, most_sent)

    def _leave_join(self) -> None:
        """All ranks have run out of inputs, after different numbers of iterations."""
        if self._rounds is not None:
            epochs = [row[0] for row in collectives.all_gather_ints(self._group, [self._rounds.epoch])]
            self._rounds.continue_at(max(epochs))

    def _shadow(self) -> None:
        """On a rank that has run out of inputs: take part in what the others do now."""
        if self._status.steps_in_backward:  # DDP's shadow calls the hook
            return
        rounds, gradients = self._rounds, self._gradients
        if rounds is None or gradients is None:
            self._step(None, {}, join.meet(self._group, join.Call(join.JOINED)))
            return
        everyone = join.meet(self._group, join.Call(join.JOINED, sent=rounds.sent))
        call = next((call for call in everyone if call.kind != join.JOINED), join.Call(join.JOINED))
        first, second = call.arguments
        if call.kind == join.ROUND:
            rounds.shadow(self._meeting_of(everyone))
        elif call.kind == join.CLIP:
            clipping.clip(self._all_params, gradients, first, second, error_if_nonfinite=False)
        elif call.kind == join.UNSCALE:
            like = self._placed.params[int(second)]
            scale = torch.tensor(first, dtype=torch.float32, device=like.device)
            gradients.unscale_like(like, torch.zeros(1, device=like.device), scale)
        else:
            self._step(None, {}, everyone)

    # --- groups ---------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. What was placed stays where it is.

        Collective: call on every rank of the group.
        """
        if self._placement is None:
            super().add_param_group(param_group)
            return
        placement, count = self._placement, len(self.param_groups)
        try:
            with self._undone_everywhere("add_param_group"):
                group = groups.normalize_group(param_group)
                granularity = groups.take_granularity(group, placement.default_granularity)
                groups.name_empty_groups([*self.param_groups, group])
                self._reduces.check_params(tensor for _, tensor in groups.named(group["params"]))
                given = dict(group)
                super().add_param_group(group)
                placement.extend(self.optim, self.param_groups, granularity, given)
            copy_options(self.optim.param_groups[count:], self.param_groups[count:], placement.notes)
            self._board.agree("add_param_group", placement.facts(self.param_groups))
        except BaseException:
            del self.param_groups[count:]
            placement.retract(self.optim, count)
            raise
        if self._broadcasts:
            collectives.copy_from_rank_0(self._group, self.param_groups[-1]["params"])
        placement.settle()
        if self._rounds is not None:
            # What an iteration that was given up has left under way belongs to the old buckets.
            self._rounds.catch_up(max(row[0] for row in collectives.all_gather_ints(self._group, [self._rounds.sent])))
            self._rounds.extend()
        for notify in self._when_extended:
            notify()
        self._expose_state()
        if placement.has_eager_state and self._status.snapshot is not None:  # the new parameters came with state
            self._status.changed()

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle: everything but the process group, which is found again by name, and the hooks."""
        if self._gradients is not None or self._status.has_hook:
            raise RuntimeError(
                "a copy expects an optimizer without hooks on its parameters, but shard_gradients and overlap_with_ddp "
                "have some. Copy its state dict instead."
            )
        return {
            "defaults": self.defaults,
            "param_groups": self.param_groups,
            "optim": self.optim,
            "parameters_as_bucket_view": self.parameters_as_bucket_view,
            "_placement": self._placed.portable(),
            "_status": Status(self._status.snapshot, self._status.has_state, self._status.recipient),
            "_group_name": collectives.group_name(self.process_group),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        Joinable.__init__(self)
        self._group = collectives.open_group(collectives.find_group(state.pop("_group_name")))
        self._meeting_place = Board(self._group, kind="copy")
        self.process_group, self.initialized = self._group.process_group, True
        self._gradients, self._rounds, self._broadcasts = None, None, False
        self._overlap_with_ddp = self._lazy_gather = False
        self._reduces = ReduceSettings()
        self._when_extended = []
        self.world_size, self.rank = self._group.world_size, self._group.rank
        self.global_rank = self._group.global_rank
        super().__setstate__(state)
        self._placed.revive(self._group)
        self._expose_state()

    # --- tools ----------------------------------------------------------------------------------------------------

    def check_replicas(self) -> None:
        """Raise on every rank, naming the first parameter and the ranks that differ, unless all hold the same bits.

        Collective: call on every rank of the group.
        """
        self._board.agree("check_replicas", [])
        replicas.check(self._group, self._placed.layout, self._placed.params)

    @property
    def layout(self) -> Layout:
        """Which piece of which parameter lies in which bucket, owned by which rank."""
        return self._placed.layout

    def memory(self) -> MemoryReport:
        """Bytes of parameters, gradients and optimizer state that this rank holds, measured on its live tensors."""
        sharded = []
        if self._gradients is not None and self._rounds is not None:
            sharded = [*self._gradients.shards(), *self._rounds.tensors()]
        return memory.measure(self._placed.params.values(), self.optim.state, sharded)

    def __getattr__(self, name: str) -> Any:
        """Forward ``train`` and ``eval`` to a local optimizer that has them (schedule-free ones do).

        They change the parameters that the rank owns, so a gather follows: collective, call on every rank.
        """
        if name not in ("train", "eval") or not callable(getattr(self.__dict__.get("optim"), name, None)):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def switch() -> None:
            self.wait_for_parameters()
            self._notice_changes()
            copy_options(self.param_groups, self.optim.param_groups)
            getattr(self.optim, name)()
            copy_options(self.optim.param_groups, self.param_groups, self._placed.notes)
            gather(self._placed, self._new_gathers())

        return switch

    # --- uneven inputs --------------------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook that shadows this rank's part once it has run out of inputs. List DDP before the optimizer.

        With ``shard_gradients`` there is no DDP, and ``divide_by_initial_world_size`` is taken as DDP takes it.
        """
        self._status.divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        return self._all_params[0].device if self._all_params else torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self.process_group


class _Shadow(JoinHook):
    """Takes part in what the ranks that still have inputs do."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        self._optimizer._shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._optimizer._leave_join()

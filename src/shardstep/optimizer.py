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

from shardstep import collectives, groups, replicas, report, saving, uneven
from shardstep.agreement import Board
from shardstep.layout import Layout
from shardstep.local import copy_options
from shardstep.placement import Placement
from shardstep.report import MemoryReport
from shardstep.saving import Snapshot
from shardstep.state import StateView, collect, describe
from shardstep.stepping import GatherFailed, gather, update_and_gather

logger = logging.getLogger(__name__)


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Wraps any optimizer and shards its state over the ranks of a process group (ZeRO-1).

    Takes the arguments of ``torch.distributed.optim.ZeroRedundancyOptimizer``; changing the import is the whole
    migration. Gradients must be the same on all ranks when ``step`` is called, as DDP leaves them. A step is

    1. *reduce*: nothing here, DDP (or the user) has reduced the gradients;
    2. *update*: the local optimizer steps this rank's pieces, bucket by bucket if it may be split;
    3. *gather*: each bucket's shards go to all ranks while the next bucket is updated.

    Building one is collective: every rank of the group builds it, with the same parameters and options.

    Args:
        params: everything that torch.optim takes: tensors, (name, tensor) pairs, dicts of groups. A group may carry
            ``"shard"`` to choose for itself.
        optimizer_class: the class of the local optimizer.
        process_group: the ranks to shard over (default: all).
        parameters_as_bucket_view: make the parameters views of one buffer per bucket, so that nothing is packed.
        overlap_with_ddp: step inside DDP's backward; not yet available.
        shard: "element" cuts parameters anywhere and gives every rank exactly its share; "tensor" keeps them whole;
            "auto" asks the optimizer, by stepping tiny tensors, whether it may be cut.
        bucket_cap_mb: the size of a bucket, in MiB.
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
        **defaults: Any,
    ) -> None:
        self._placement: Placement | None = None  # None while torch's constructor adds the groups one by one
        self._meeting_place: Board | None = None
        with self._undone_everywhere("ZeroRedundancyOptimizer", process_group):
            if overlap_with_ddp:
                raise NotImplementedError(
                    "overlap_with_ddp=True is not available yet. Leave it out: stepping after backward gives the same."
                )
            new_groups = groups.normalize(params)
            granularities = [groups.take_granularity(group, shard) for group in new_groups]
            groups.name_empty_groups(new_groups)
            Optimizer.__init__(self, new_groups, dict(defaults))
            Joinable.__init__(self)
            self._group = collectives.open_group(process_group)
            self._meeting_place = Board(self._group)
            placement = Placement(
                self._group, optimizer_class, defaults, shard, bucket_cap_mb, views=bool(parameters_as_bucket_view)
            )
            self.optim = placement.build(self.param_groups, granularities)
        self._placement = placement
        self.process_group = self._group.process_group
        self.world_size = self._group.world_size
        self.rank = self._group.rank
        self.global_rank = self._group.global_rank
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.initialized = True
        self.defaults = self.optim.defaults
        copy_options(self.optim.param_groups, self.param_groups)
        self._board.agree("ZeroRedundancyOptimizer", placement.facts(self.param_groups))
        placement.settle()
        self._snapshot: Snapshot | None = None
        self._stepped = False  # whether any rank may hold state
        self._failure = ""  # how the last step failed, if it did
        self._gather_failed = False
        self._expose_state()
        if collectives.debug_is_on():
            logger.info("rank %d of %d: %s", self.rank, self.world_size, report.layout_text(placement.layout))

    # --- step -----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this rank's pieces and gather the parameters.

        Collective: call on every rank of the group. ``closure`` is run on each rank; ``kwargs`` go to the local
        optimizer's step. Returns what that returns.
        """
        Join.notify_join_context(self)
        return self._step(closure, kwargs, active=True)

    def _step(self, closure: Callable[[], Any] | None, kwargs: dict[str, Any], active: bool) -> Any:
        """``active``: False in the shadow step of a rank that has joined (see uneven.py)."""
        placement = self._placed
        self._check_last_step()
        self._notice_changes()
        if active and closure is None:
            with self._undone_everywhere("step"):
                placement.check_still_trained()
        self._snapshot, self._stepped = None, True
        # With a closure the gradients to lend are those it leaves behind: see _sharded.
        borrowed = self._lend(active) if self._join_config.enable and not callable(closure) else None
        copy_options(self.param_groups, self.optim.param_groups)
        self._failure = "it did not end"
        try:
            if borrowed is None:
                with self._own_gradients():
                    evaluate = self._sharded(closure) if callable(closure) else closure
                    loss = update_and_gather(placement, self.optim, self._board, evaluate, kwargs)
            else:
                with uneven.borrowed_gradients(placement.shard.tensors, borrowed):
                    loss = update_and_gather(placement, self.optim, self._board, None, {})
        except GatherFailed as error:
            self._gather_failed, self._failure = True, str(error)
            raise
        copy_options(self.optim.param_groups, self.param_groups)
        self._failure = ""
        return loss

    def _check_last_step(self) -> None:
        """After a step that failed: did the others fail with us, at the same place? Then it can go on."""
        if self._gather_failed:
            raise RuntimeError(
                "step expects a process group in which all ranks are at the same place, but an earlier step failed "
                f"({self._failure}). Start the processes again, from a checkpoint."
            )
        if self._failure:
            self._board.agree("step (the previous one failed)", [("exchanges", {"started": str(self._placed.started)})])

    def _sharded(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure for the local optimizer: its pieces get their slices of the gradients it computes."""
        lends = self._join_config.enable

        def evaluate() -> Any:
            nonlocal lends
            loss = closure()
            if lends:
                self._lend(active=True)
                lends = False
            self._placed.shard.bind_gradients()
            return loss

        return evaluate

    @contextmanager
    def _own_gradients(self) -> Iterator[None]:
        self._placed.shard.bind_gradients()
        try:
            yield
        finally:
            self._placed.shard.release_gradients()

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

    def _lend(self, active: bool) -> dict[int, Tensor] | None:
        lending = uneven.Lending.meet(self._group, active)
        placement = self._placed
        return uneven.lend(self._group, lending, placement.layout, placement.params, self.param_groups)

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
                super().add_param_group(group)
                placement.extend(self.optim, self.param_groups, granularity)
            copy_options(self.optim.param_groups[count:], self.param_groups[count:])
            self._board.agree("add_param_group", placement.facts(self.param_groups))
        except BaseException:
            del self.param_groups[count:]
            placement.retract(self.optim, count)
            raise
        placement.settle()
        self._expose_state()
        if placement.has_eager_state and self._snapshot is not None:  # the new parameters came with state
            self._snapshot, self._stepped = None, True

    # --- state ----------------------------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0, *, chunk_mb: float = 16) -> None:
        """Collect the full state on the CPU of rank ``to``, where ``state_dict`` returns it until the next change.

        Collective: call on every rank of the group. No rank holds more than two chunks of ``chunk_mb`` MiB besides
        its state and, on rank ``to``, the result.
        """
        placement = self._placed
        with self._undone_everywhere("consolidate_state_dict"):
            if not isinstance(to, int) or not 0 <= to < self.world_size:
                raise ValueError(
                    f"to expects a rank of the process group, from 0 to {self.world_size - 1}, but got {to!r}. "
                    "Leave it out for 0."
                )
            if not isinstance(chunk_mb, (int, float)) or not chunk_mb > 0:
                raise ValueError(f"chunk_mb expects a size above 0 in MiB but got {chunk_mb!r}. Leave it out for 16.")
            described = describe(placement.shard, placement.layout, self.optim.state)
        self._board.agree("consolidate_state_dict", [("argument", {"to": str(to), "chunk_mb": str(chunk_mb)})])
        chunk = max(int(chunk_mb * 2**20), 1)
        with self._undone_everywhere("consolidate_state_dict"):
            states: dict[Any, Any] = collect(self._group, placement.layout, described, to=to, chunk_bytes=chunk)
        self._board.agree("consolidate_state_dict", [("outcome", {"done": "True"})])
        if self.rank == to:
            states.update((key, value) for key, value in self.optim.state.items() if not isinstance(key, Tensor))
        self._snapshot = Snapshot(to, states)

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """The state in torch's plain form: loadable by the plain optimizer and at any number of ranks.

        Not collective. Before the first step it is the empty form. Afterwards call ``consolidate_state_dict`` first:
        its recipient gets the full state, the other ranks the groups, an empty state and a mark that says who has it.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        if self._stepped and self._snapshot is None:
            raise RuntimeError(
                "state_dict() expects the state to be consolidated since the last step, load or change, but it is not. "
                f"Call optimizer.consolidate_state_dict(to={self.rank}) on every rank first."
            )
        state_dict = saving.plain_form(self.param_groups, self._snapshot, self.rank)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict in torch's plain form, from this class or the plain optimizer, saved at any world size.

        Collective: call on every rank of the group, with the same full dict, which is not changed. Each rank takes
        copies of its pieces. If it fails on a rank it fails on all, and nothing is changed anywhere.
        """
        with self._undone_everywhere("load_state_dict"):
            state_dict = saving.outer_copy(state_dict)
            for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
                changed = pre_hook(self, state_dict)
                state_dict = state_dict if changed is None else changed
            undo = saving.load_local(state_dict, self.param_groups, self._placed, self.optim)
        try:
            self._board.agree("load_state_dict", saving.facts_of(state_dict))
        except BaseException:
            undo()
            raise
        saving.load_options(state_dict, self.param_groups, self.optim.param_groups)
        self._snapshot, self._stepped = None, bool(state_dict["state"])
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def full_state(self, param: Tensor) -> dict[str, Any]:
        """One parameter's full state, on the CPU of every rank.

        Collective: call on every rank of the group, with the same parameter.
        """
        placement = self._placed
        with self._undone_everywhere("full_state"):
            index = placement.index_of.get(param) if isinstance(param, Tensor) else None
            if index is None:
                told = f"a tensor of shape {tuple(param.shape)}" if isinstance(param, Tensor) else repr(param)
                raise ValueError(
                    f"full_state expects a parameter of this optimizer but got {told} that is in none of its groups. "
                    "Pass one of model.parameters()."
                )
            described = describe(placement.shard, placement.layout, self.optim.state, only=index)
        self._board.agree("full_state", [("argument", {"param": placement.layout.spec_of[index].label})])
        states = collect(self._group, placement.layout, described, to=None, chunk_bytes=2**24)
        return states.get(index, {})

    @property
    def state(self) -> StateView:  # type: ignore[override]
        """The local optimizer's state, keyed by the user's parameters: see ``StateView``."""
        return self._state_view

    @state.setter
    def state(self, value: Any) -> None:
        view = self.__dict__.get("_state_view")
        if view is None:  # torch's constructor, before there is a local optimizer
            return
        view.clear()
        for key, entry in value.items():
            if entry:
                view[key] = entry

    def _expose_state(self) -> None:
        placement = self._placed
        owned = {placement.params[index]: tensor for index, tensor in placement.shard.tensors.items()}
        me = weakref.proxy(self)  # a real reference would keep all state alive until the garbage collector comes
        self._state_view = StateView(self._all_params, owned, lambda: me.optim.state, lambda: me._state_was_edited())

    def _state_was_edited(self) -> None:
        self._snapshot, self._stepped = None, True

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle: everything but the process group, which is found again by name, and the hooks."""
        return {
            "defaults": self.defaults,
            "param_groups": self.param_groups,
            "optim": self.optim,
            "parameters_as_bucket_view": self.parameters_as_bucket_view,
            "_placement": self._placed.portable(),
            "_snapshot": self._snapshot,
            "_stepped": self._stepped,
            "_group_name": collectives.group_name(self.process_group),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        Joinable.__init__(self)
        self._group = collectives.open_group(collectives.find_group(state.pop("_group_name")))
        self._meeting_place = Board(self._group, kind="copy")
        self.process_group, self.initialized = self._group.process_group, True
        self._failure, self._gather_failed = "", False
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
        return report.measure(self._placed.params.values(), self.optim.state)

    def __getattr__(self, name: str) -> Any:
        """Forward ``train`` and ``eval`` to a local optimizer that has them (schedule-free ones do).

        They change the parameters that the rank owns, so a gather follows: collective, call on every rank.
        """
        if name not in ("train", "eval") or not callable(getattr(self.__dict__.get("optim"), name, None)):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def switch() -> None:
            self._notice_changes()
            copy_options(self.param_groups, self.optim.param_groups)
            getattr(self.optim, name)()
            copy_options(self.optim.param_groups, self.param_groups)
            gather(self._placed, self._board)

        return switch

    # --- uneven inputs --------------------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook that shadows ``step`` on a rank that has run out of inputs. List DDP before the optimizer."""
        return _ShadowStep(self)

    @property
    def join_device(self) -> torch.device:
        return self._all_params[0].device if self._all_params else torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self.process_group

    # --- inside ---------------------------------------------------------------------------------------------------

    @property
    def _all_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    @property
    def _placed(self) -> Placement:
        assert self._placement is not None
        return self._placement

    @property
    def _board(self) -> Board:
        assert self._meeting_place is not None
        return self._meeting_place

    @contextmanager
    def _undone_everywhere(self, call: str, process_group: Any = None) -> Iterator[None]:
        """If this rank fails here, tell the ranks that wait for it, before the error goes on to the user."""
        try:
            yield
        except Exception as error:
            board = self._meeting_place
            if board is None and collectives.is_member(process_group):
                board = Board(collectives.open_group(process_group))
            if board is not None:
                board.fail(call, error)
            raise


class _ShadowStep(JoinHook):
    """Takes part in the steps of the ranks that still have inputs."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        self._optimizer._step(None, {}, active=False)

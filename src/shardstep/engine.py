"""One step: gradients -> update -> all-gather, bucket by bucket. The only step loop.

``step()``, the closure, both DDP hooks, the shadow of a rank without inputs and ``train()``/``eval()`` all come here.
Where gradients come from is the source's business (``grads/source.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardstep.comm import collectives
from shardstep.comm.consensus import RankConsensus
from shardstep.comm.phases import phase
from shardstep.comm.process_group import check_still_alone
from shardstep.grads.source import GradientSource, StepGradients
from shardstep.params import loaded_masters
from shardstep.params.gather_window import GatherWindow
from shardstep.params.lazy_gather import LazyGathers
from shardstep.params.local_optimizer import copy_options, fire_post_hooks, fire_pre_hooks, unhooked_step
from shardstep.params.local_update import LocalUpdate
from shardstep.params.progress import Progress
from shardstep.params.relocation import bring_state
from shardstep.params.sharded_parameters import ShardedParameters

logger = logging.getLogger(__name__)

Closure = Callable[[], Any]
ParamGroups = Sequence[dict[str, Any]]


class Step:
    """A step under way. All ranks advance the same buckets in the same order, then finish.

    A bucket travels while the next one is updated. ``update``: what updates everything at once instead, before any
    bucket travels.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sharded = engine.sharded
        self._window = GatherWindow(engine.sharded, engine.consensus, engine.progress)
        self.update: Callable[[], Any] | None = None
        self.kwargs: dict[str, Any] = {}  # for the local optimizer's step
        self._local_step = unhooked_step(engine.optimizer)
        self._waiting = dict.fromkeys(self._sharded.plan.active_buckets)

    @property
    def waiting(self) -> list[int]:
        """The buckets that were not advanced yet, in order."""
        return list(self._waiting)

    def advance(self, position: int) -> None:
        """Update this rank's pieces of one bucket, and start its gather."""
        del self._waiting[position]
        if self.update is None:
            with phase("shardstep::update"):
                self._engine.local.bucket(self._local_step, position)
        self._window.start(position)

    def finish(self, lazily: bool = False) -> Any:
        """Advance the buckets that wait, and bring all ranks' parameters up to date. What ``update`` returned.

        ``lazily``: start with the buckets that the next forward needs first, and leave the last ones under way.
        """
        result = None
        if self.update is not None:
            with phase("shardstep::update"):
                result = self.update()
        for position in reversed(self.waiting) if lazily else self.waiting:
            self.advance(position)
        if self.update is None and not self._sharded.plan.owns_active:
            self._engine.update_all()  # its groups are empty, but some optimizers write into them
        if not lazily:
            self._window.finish()
        return result

    def take_lazy_gathers(self) -> LazyGathers | None:
        """The gathers that a lazy ``finish`` has left under way; their parameters wait for them."""
        if not self._window.in_flight:
            return None
        self._window.relay()
        return LazyGathers(self._window, self._sharded.params_of)

    def drain(self) -> None:
        """Give up: wait for what is under way, so that nothing is written into memory that others have later."""
        self._window.drain()

    @contextmanager
    def failing_together(self, call: str = "step") -> Iterator[None]:
        """If the step fails in this context, the other ranks hear of it, and what is under way is waited for."""
        try:
            yield
        except Exception as error:
            self._engine.progress.fail()
            clearer = self._sharded.kind_error()
            self._engine.report_failure(call, clearer or error)
            self._window.drain(has_reported=True)
            if clearer is not None:
                raise clearer from error
            raise


class Engine:
    """Steps one sharded optimizer. ``param_groups`` are always the user's, whose options count."""

    def __init__(
        self,
        sharded: ShardedParameters,
        optimizer: Optimizer,
        consensus: RankConsensus,
        source: GradientSource,
        lazy_gather: bool = False,
    ) -> None:
        self.sharded = sharded
        self.optimizer = optimizer  # the local one
        self.local = LocalUpdate(sharded, optimizer)
        self.consensus = consensus
        self.source = source
        self._replaced: GradientSource | None = None  # the source before
        self.progress = Progress()
        self._lazy_gather = lazy_gather
        self._lazy: LazyGathers | None = None

    def take_gradients_from(self, source: GradientSource) -> None:
        """From now on, instead of from the parameters. Between steps or in a closure, and once."""
        if not self.source.may_be_replaced:
            raise AssertionError(f"{type(self.source).__name__} cannot be replaced by {type(source).__name__}")
        self._replaced, self.source = self.source, source

    def step(
        self,
        param_groups: ParamGroups,
        closure: Closure | None = None,
        kwargs: dict[str, Any] | None = None,
        source: StepGradients | None = None,
    ) -> Any:
        """Collective. One step with the gradients of ``source``; return what the local optimizer's step returned.

        A closure that cannot be called reaches the local optimizer as it is.
        """
        source = source or self.source
        self._start()
        try:
            if not callable(closure):
                source.prepare(param_groups)
            copy_options(param_groups, self.optimizer.param_groups)
            with self._reporting():
                source.bind(self.sharded.plan.active_buckets)
            evaluate = self._evaluation(closure, source, param_groups) if callable(closure) else closure
            step = self._open(kwargs or {}, evaluate)
            with step.failing_together():
                loss = step.finish(lazily=self._lazy_gather and closure is None and source.may_be_lazy)
                fire_post_hooks(self.optimizer, step.kwargs)
                self._lazy = step.take_lazy_gathers()
        except BaseException:  # also an interrupt
            self.progress.fail()
            raise
        finally:
            self._now(source).release()
        self._end(param_groups, self._now(source))
        return loss

    def begin(self, param_groups: ParamGroups) -> Step:
        """Collective. Begin a step whose gradients will come bucket by bucket; ``end`` ends it."""
        self._start()
        copy_options(param_groups, self.optimizer.param_groups)
        return self._open({}, None)

    def end(self, step: Step, param_groups: ParamGroups, source: StepGradients) -> None:
        """Collective. All gradients are bound: finish a step that was begun."""
        with step.failing_together():
            step.finish()
            fire_post_hooks(self.optimizer, step.kwargs)
        source.release()
        self._end(param_groups, source)

    def abort(self, step: Step, source: StepGradients) -> None:
        """Give up a step that was begun. The next one compares how far each rank came."""
        self.progress.fail()
        step.drain()
        source.release()

    def switch(self, mode: str, param_groups: ParamGroups) -> None:
        """Collective. Call ``train`` or ``eval`` of the local optimizer, which changes the parameters that it owns.

        A step that failed before counts as failed afterwards: this completes nothing.
        """
        self.check_not_broken(mode)
        self.progress.copies.wait()
        self.wait_for_parameters()
        self.notice_changes()
        copy_options(param_groups, self.optimizer.param_groups)
        with self._all_active() if self._has_frozen_state() else nullcontext():
            step = Step(self)
            step.update = partial(self.local.switch, getattr(self.optimizer, mode))
            with step.failing_together(mode):
                self.local.prepare(whole=True)
                step.finish()
        self.local.end()
        self.progress.changed(self.progress.has_state)
        copy_options(self.optimizer.param_groups, param_groups, self.sharded.builder.notes)

    def update_all(self, closure: Closure | None = None, kwargs: dict[str, Any] | None = None) -> Any:
        """One step of the local optimizer over everything. Its step need not know closures unless there is one."""
        step = unhooked_step(self.optimizer)
        return step(**(kwargs or {})) if closure is None else step(closure=closure, **(kwargs or {}))

    def wait_for_parameters(self) -> None:
        """Finish the gathers that the last step has left under way."""
        lazy, self._lazy = self._lazy, None
        if lazy is not None:
            lazy.finish()

    def load_masters(self, masters: Mapping[int, Tensor], alone: Collection[int]) -> None:
        """Collective. Masters were loaded: write the parameters anew from them. Those without begin as they are.

        ``alone``: parameters whose masters came with no other state.
        """
        sharded = self.sharded
        taken = loaded_masters.that_fit(sharded, masters)
        lacking = min(masters.keys() - taken.keys(), default=-1)
        has_state = any(entry for key, entry in self.optimizer.state.items() if isinstance(key, Tensor))
        rows = collectives.all_gather_ints(sharded.group, [bool(taken), lacking, has_state])
        if any(row[0] for row in rows) or sharded.masters.are_kept:
            self.wait_for_parameters()
            self.notice_changes()
            # Without state a parameter was not stepped yet, unless the optimizer's class makes none.
            loaded_masters.take(sharded, taken, unstepped=alone if any(row[2] for row in rows) else ())
        if any(row[0] for row in rows):
            self._gather_all()
        lacked = [row[1] for row in rows if row[1] >= 0]
        if lacked and sharded.rank == 0:  # which may own nothing of them
            logger.warning(
                "the loaded state has float32 masters, but this optimizer keeps none for %s, so they are left out. "
                "Pass master_weights=torch.float32 or 'remainder' to go on with them.",
                sharded.layout.spec_of[min(lacked)].label,
            )

    def notice_changes(self) -> None:
        """Parameters that were moved, given other memory, frozen or unfrozen since the last step."""
        sharded = self.sharded
        check_still_alone(sharded.group)
        self.source.follow()
        with self._reporting():
            if sharded.moved():
                sharded.bind()
            if sharded.state_is_behind:
                bring_state(sharded, self.optimizer)
                sharded.state_is_behind = False
        active = sharded.active_now()
        if active != sharded.active:
            self.consensus.note(sharded.describe_change(active))
            self.consensus.check_equal("step, after a change of requires_grad", sharded.activity_facts(active))
            sharded.activate(active)

    def check_not_broken(self, call: str) -> None:
        """RuntimeError if a gather has failed: the ranks are at different places, and what they hold does not fit.

        Not all of them need know, so ``call`` compares afterwards, and hears of it then. On an accelerator the host
        sees no gather fail: there it is known when a rank that failed has told how far it came.
        """
        heard = self.consensus.take_heard()
        if heard is not None and heard.place not in (None, self.progress.gathers_started):
            self.progress.break_off(heard.short)
        if self.progress.is_broken:
            error = RuntimeError(
                f"{call} expects a process group in which all ranks are at the same place, but an earlier step failed "
                f"({self.progress.failure}). Start the processes again, from a checkpoint."
            )
            self.report_failure(call, error)
            raise error

    def report_failure(self, call: str, error: BaseException) -> None:
        """Tell the other ranks that this one failed, and how far it came: some may wait in a gather further on."""
        self.consensus.report_failure(call, error, self.progress.gathers_started)

    def _reporting(self) -> AbstractContextManager[None]:
        return self.consensus.reporting("step", self.progress.gathers_started)

    def _start(self) -> None:
        self._check_last_step()
        self.wait_for_parameters()
        self.notice_changes()
        self.progress.changed()
        self.progress.begin()
        self.progress.is_captured |= self.sharded.is_captured()

    def _open(self, kwargs: dict[str, Any], evaluate: Closure | None) -> Step:
        step = Step(self)
        with step.failing_together():
            step.kwargs = fire_pre_hooks(self.optimizer, kwargs)
            # The same on every rank, so that all start the same gathers at the same time, whatever they own.
            if evaluate is not None or step.kwargs or not self.sharded.builder.splittable:
                update = partial(self.update_all, evaluate, step.kwargs)
                step.update = partial(self.local.whole, update)
            self.local.prepare(whole=step.update is not None)
        return step

    def _end(self, param_groups: ParamGroups, source: StepGradients) -> None:
        self.local.end()
        copy_options(self.optimizer.param_groups, param_groups, self.sharded.builder.notes)
        self.progress.end()
        source.stepped()

    def _check_last_step(self) -> None:
        """After a step that failed: did the others fail with us, at the same place? Then it can go on."""
        self.check_not_broken("step")
        if self.progress.failure:
            started = {"started": str(self.progress.gathers_started)}
            self.consensus.check_equal("step (the previous one failed)", [("gathers", started)])

    def _evaluation(self, closure: Closure, source: StepGradients, param_groups: ParamGroups) -> Closure:
        """The closure for the local optimizer: its pieces get their slices of the gradients it computes."""

        def evaluate() -> Any:
            if self.sharded.builder.moves_first:  # each rank has moved its pieces: the closure is about all of them
                self._gather()
            self._now(source).release()  # backward finds on the parameters what it left there
            loss = closure()
            self._now(source).prepare(param_groups)
            self._now(source).bind(self.sharded.plan.active_buckets)
            self.local.take_gradients()
            return loss

        return evaluate

    def _now(self, source: StepGradients) -> StepGradients:
        """``source``, or what took its place: a closure's backward may be the first in which DDP calls our hook."""
        return self.source if source is self._replaced else source

    def _gather(self) -> None:
        """Bring all ranks' parameters up to date with their owners'."""
        step = Step(self)
        step.update = self.local.publish
        step.finish()
        self.local.end()

    def _gather_all(self) -> None:
        """Bring all ranks' parameters up to date with their owners', also frozen ones."""
        with self._all_active():
            step = Step(self)
            step.update = lambda: None
            step.finish()

    @contextmanager
    def _all_active(self) -> Iterator[None]:
        """Within this context frozen parameters are updated and sent, too."""
        active = self.sharded.active
        self.sharded.activate([True] * len(active))
        try:
            yield
        finally:
            self.sharded.activate(active)

    def _has_frozen_state(self) -> bool:
        """Collective if parameters are frozen. Whether any rank has state of one: ``train`` and ``eval`` change it."""
        sharded = self.sharded
        if all(sharded.active):
            return False
        frozen = [index for index, active in zip(sharded.params, sharded.active, strict=True) if not active]
        tensors = (sharded.pieces.tensors[index] for index in frozen if index in sharded.pieces.tensors)
        found = any(self.optimizer.state.get(tensor) for tensor in tensors)
        return any(row[0] for row in collectives.all_gather_ints(sharded.group, [found]))

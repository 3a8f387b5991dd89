"""ZeroRedundancyOptimizer: the contract of torch.optim.Optimizer and Joinable over a sharded optimizer."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from shardstep.comm import collectives
from shardstep.comm.process_group import ProcessGroup, debug_is_on
from shardstep.comm.rank_groups import DeviceMesh, opening
from shardstep.engine import Engine
from shardstep.grads import clipping, loss_scale
from shardstep.grads.ddp_buckets import evaluated_once
from shardstep.grads.mode import GradientMode, check_flags
from shardstep.grads.settings import ReduceSettings
from shardstep.join import JoinAttendance, UnevenInputs
from shardstep.layout import plan
from shardstep.layout.specs import Layout
from shardstep.params import groups, replicas
from shardstep.params.builder import OptimizerBuilder, check_spelling
from shardstep.params.local_optimizer import copy_options
from shardstep.params.master_modes import MasterWeights, checked_settings, take_modes
from shardstep.params.sharded_parameters import ShardedParameters
from shardstep.state import view
from shardstep.state.dicts import ShardedOptimizer
from shardstep.state.view import MemoryReport, StateView

logger = logging.getLogger(__name__)

Loss = TypeVar("Loss")


class ZeroRedundancyOptimizer(ShardedOptimizer, UnevenInputs):
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
        process_group: the ranks to shard over (default: all). Or a mesh: of one dimension, or (replicate, shard).
            Without ``init_process_group`` this process is the only rank.
        parameters_as_bucket_view: make the parameters views of one buffer per bucket, so that nothing is packed.
        overlap_with_ddp: step inside DDP's backward: see ``hook_with_zero_step``.
        shard: "element" cuts parameters anywhere and gives every rank exactly its share; "tensor" keeps them whole;
            "auto" asks the optimizer, by stepping tiny tensors, whether it may be cut.
        bucket_cap_mb: the size of a bucket, in MiB. None: a 12th of the parameters, but 1 to 12 (on accelerators 25).
        shard_gradients: reduce the gradients during backward and keep this rank's share only (ZeRO-2). The model must
            not be wrapped in DDP. ``param.grad`` is then a ``ShardedGradient``; see ``full_grad``, ``no_sync``.
        broadcast_parameters: with ``shard_gradients``: start from rank 0's parameters.
        reduce_dtype: with ``shard_gradients``: in which dtype gradients travel, are summed and kept until the step.
        gradient_buckets_in_flight: with ``shard_gradients``: how many buckets may be under way at once. None: one on
            the CPU, two elsewhere.
        overlap_backward: with ``shard_gradients``: False reduces at the end of backward instead of during it.
        lazy_gather: end a step while the last parameters still travel; whoever touches one (a forward) waits for it.
        find_unused_parameters: with ``shard_gradients`` on accelerators: parameters may be unused. (On the CPU always.)
        master_weights: for bfloat16 and float16 parameters: the optimizer steps float32 masters of this rank's pieces,
            and the parameters are what they round to. ``torch.float32`` keeps them, "remainder" keeps the 16 bits that
            a bfloat16 lacks, "stochastic" keeps nothing and rounds at random. A group may carry it, too.
        rounding_seed: with "stochastic": for other random numbers.
        **defaults: given to ``optimizer_class``.

    Attributes:
        param_groups: the groups as in torch.optim, with the user's parameters: for schedulers.
        defaults: the defaults of the local optimizer.
        optim: the local optimizer, an ``optimizer_class`` over this rank's pieces.
        process_group: the ranks that share the state; of a mesh, those along its shard dimension. None: there is no
            process group, and one rank.
        mesh: the mesh that was passed as ``process_group``; None: it was none.
        rank: this rank's number in the group.
        world_size: how many ranks the group has.

    Examples:
        ```python
        model = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)
        model(batch).sum().backward()
        optimizer.step()
        ```
    """

    process_group: ProcessGroup | None
    mesh: DeviceMesh | None
    global_rank: int
    parameters_as_bucket_view: bool
    initialized: bool  # always, as far as a user can see: torch's class has it
    engine: Engine  # what steps; for the DDP hooks and checkpoints, no part of the API  # pyrefly: ignore

    def __init__(
        self,
        params: ParamsT,
        optimizer_class: Callable[..., Optimizer],
        process_group: ProcessGroup | DeviceMesh | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        shard: groups.Granularity = "auto",
        bucket_cap_mb: float | None = None,
        shard_gradients: bool = False,
        broadcast_parameters: bool = True,
        reduce_dtype: torch.dtype | None = None,
        gradient_buckets_in_flight: int | None = None,
        overlap_backward: bool = True,
        find_unused_parameters: bool = False,
        lazy_gather: bool = False,
        master_weights: MasterWeights = None,
        rounding_seed: int = 0,
        **defaults: Any,
    ) -> None:
        with opening("ZeroRedundancyOptimizer", process_group) as open_groups:
            check_flags(
                parameters_as_bucket_view=parameters_as_bucket_view,
                overlap_with_ddp=overlap_with_ddp,
                shard_gradients=shard_gradients,
                broadcast_parameters=broadcast_parameters,
                overlap_backward=overlap_backward,
                find_unused_parameters=find_unused_parameters,
                lazy_gather=lazy_gather,
            )
            check_spelling(optimizer_class, defaults, _ARGUMENTS)
            reduce = ReduceSettings(reduce_dtype, gradient_buckets_in_flight, overlap_backward, find_unused_parameters)
            mode = GradientMode(shard_gradients, overlap_with_ddp, lazy_gather, broadcast_parameters, reduce)
            mode.check()
            new_groups = groups.normalize(params)
            granularities = [groups.take_granularity(group, shard) for group in new_groups]
            masters = checked_settings(master_weights, rounding_seed)
            modes = take_modes(new_groups, masters.mode)
            masters.check_seed(modes)
            groups.refuse_arguments(new_groups, _ARGUMENTS)
            groups.name_empty_groups(new_groups)
            given = [dict(group) for group in new_groups]
            Optimizer.__init__(self, new_groups, dict(defaults))
            Joinable.__init__(self)
            ranks, consensus = open_groups()
            sharded = ShardedParameters(
                ranks,
                OptimizerBuilder(optimizer_class, defaults),
                shard,
                bucket_cap_mb,
                views=parameters_as_bucket_view,
                apart=mode.needs_own_tensors,
                reduce_dtype=reduce_dtype,
                plain_only=mode.needs_plain_tensors,
                masters=masters,
            )
            self.optim = sharded.build(self.param_groups, granularities, given, modes)
            mode.check_params(sharded.params.values())
        self.defaults = self.optim.defaults
        copy_options(self.optim.param_groups, self.param_groups, sharded.builder.notes)
        consensus.check_equal("ZeroRedundancyOptimizer", sharded.facts(self.param_groups, mode.facts()))
        source = mode.source(sharded, consensus, attendance := JoinAttendance(self, ranks))
        source.adopt(list(sharded.params.values()))
        sharded.settle()
        source.extend()
        engine = Engine(sharded, self.optim, consensus, source, lazy_gather)
        self._assemble(engine, attendance, parameters_as_bucket_view)
        if debug_is_on():
            logger.info("rank %d of %d: %s", self.rank, self.world_size, plan.layout_text(sharded.layout))

    def _assemble(self, engine: Engine, attendance: JoinAttendance, views: bool) -> None:
        """Put the parts together."""
        group = engine.sharded.group
        self.process_group, self.mesh = group.process_group, engine.sharded.ranks.mesh
        self.world_size, self.rank, self.global_rank = group.world_size, group.rank, group.global_rank
        self.parameters_as_bucket_view, self.initialized = views, True
        self.engine, self._attendance = engine, attendance
        engine.progress.has_state = engine.sharded.builder.has_eager_state
        self.saves = {}
        self._view = StateView(engine.sharded, self.optim, engine.progress)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """For torch's GradScaler: whether ``step`` takes the scale itself, or refuses it."""
        return self.engine.source.steps_in_backward or loss_scale.takes_scale(self.engine.sharded)

    # --- step -----------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None, **kwargs: Any) -> None: ...

    @overload
    def step(self, closure: Callable[[], Loss], **kwargs: Any) -> Loss: ...

    def step(self, closure: Callable[[], Loss] | None = None, **kwargs: Any) -> Loss | None:
        """Update this rank's pieces and gather the parameters.

        Collective: call on every rank of the group. ``closure`` is run on each rank; ``kwargs`` go to the local
        optimizer's step. Returns what that returns. With a DDP hook the step has been made when backward is over: then
        this only runs the closure, if there is one.
        """
        engine = self.engine
        if engine.source.steps_in_backward and loss_scale.is_scaled(self):
            raise loss_scale.stepped_already()
        if loss_scale.must_be_skipped(self):
            return None
        if engine.source.may_step_in_backward and callable(closure):
            closure = evaluated_once(closure)  # its backward may make the first step, so it runs before one is begun
        if engine.source.steps_in_backward:
            engine.source.follow()  # (after a move DDP's hook is called no more, which would go unnoticed)
            loss = closure() if callable(closure) else None
        else:
            gradients = self._attendance.begin_step(engine.source, engine.sharded, callable(closure))
            with loss_scale.unscaled(self, engine.sharded):
                loss = engine.step(self.param_groups, closure, kwargs, gradients)
        if engine.sharded.builder.consumes:  # heavyball's set the gradients they have used to None, of their pieces
            self.zero_grad()
        return loss

    def wait_for_parameters(self) -> None:
        """With ``lazy_gather``: finish the gathers that are still under way.

        Touching a parameter does so by itself. Call this before the forward of a model compiled with ``torch.compile``,
        which would compile anew for a parameter that is under way.
        """
        self.engine.wait_for_parameters()

    if TYPE_CHECKING:  # a type checker that sees __getattr__ believes in any name

        def train(self) -> None: ...

        def eval(self) -> None: ...

    else:

        def __getattr__(self, name: str) -> Callable[[], None]:
            """Forward ``train`` and ``eval`` to a local optimizer that has them (schedule-free ones do).

            They change the parameters that the rank owns, so a gather follows: collective, call on every rank.
            """
            if name == "count_lost_updates":  # until 0.4
                raise AttributeError(
                    "count_lost_updates is gone: copy the parameters before step(), and compare afterwards. "
                    'docs/precision.md has the lines, under "Updates that are lost".'
                )
            if name not in ("train", "eval") or not callable(getattr(self.__dict__.get("optim"), name, None)):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

            def switch() -> None:
                self.engine.switch(name, self.param_groups)

            return switch

    # --- gradients ------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients (or set them to zero).

        With ``shard_gradients`` also what is still under way: after an exception in forward or backward, call it on
        every rank and go on with the next batch.
        """
        with self.engine.source.cleared(set_to_none):
            super().zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """With ``shard_gradients``: within this context backward adds to local gradients and sends nothing.

        The first backward after it reduces the sum. Full gradients are held meanwhile.
        """
        with self.engine.source.no_sync():
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale the gradients so that the norm of all of them together is at most ``max_norm``.

        Returns the norm as it was, 0-dim, the same bits on every rank. Half precision is added up in float32.
        Collective with ``shard_gradients``: call on every rank of the group.
        """
        order = clipping.checked_order(norm_type)
        source, params = self.engine.source, list(self.engine.sharded.params.values())
        return source.clip(params, float(max_norm), order, error_if_nonfinite)

    def full_grad(self, param: Tensor) -> Tensor | None:
        """The whole reduced gradient of one parameter, on every rank; None if it has none.

        Collective with ``shard_gradients``: call on every rank of the group, with the same parameter.
        """
        return self.engine.source.full(self._index_of(param, "full_grad"))

    def broadcast_buffers(self, model: torch.nn.Module) -> None:
        """Give all ranks rank 0's buffers (the running statistics of BatchNorm), as DDP does before every forward.

        Collective: call on every rank of the group. Without DDP nobody else does.
        """
        if self.in_join_context:
            raise RuntimeError(
                "broadcast_buffers expects all ranks to call it, but in a Join context some may have run out of "
                "inputs. Call it before or after."
            )
        try:
            collectives.copy_from_rank_0(self.engine.sharded.ranks.everyone, list(model.buffers()))
        except RuntimeError as error:
            raise RuntimeError(self.engine.consensus.explain_absence("broadcast_buffers", error)) from error

    # --- groups ---------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. What was placed stays where it is.

        Collective: call on every rank of the group.
        """
        engine: Engine | None = getattr(self, "engine", None)
        if engine is None:  # torch's constructor adds the groups one by one
            super().add_param_group(param_group)
            return
        sharded, source, count = engine.sharded, engine.source, len(self.param_groups)
        source.follow()
        try:
            with engine.consensus.reporting("add_param_group"):
                group = groups.normalize_group(param_group)
                granularity = groups.take_granularity(group, sharded.default_granularity)
                (master_mode,) = take_modes([group], sharded.masters.settings.mode, first=count)
                groups.refuse_arguments([group], _ARGUMENTS, first=count)
                groups.name_empty_groups([*self.param_groups, group])
                source.check_params(tensor for _, tensor in groups.named(group["params"]))
                given = dict(group)
                super().add_param_group(group)
                sharded.extend(self.optim, self.param_groups, granularity, given, master_mode)
            copy_options(self.optim.param_groups[count:], self.param_groups[count:], sharded.builder.notes)
            engine.consensus.check_equal("add_param_group", sharded.facts(self.param_groups))
        except BaseException:
            del self.param_groups[count:]
            sharded.retract(self.optim, count)
            raise
        source.adopt(self.param_groups[-1]["params"])
        sharded.settle()
        source.extend()
        if sharded.builder.has_eager_state and engine.progress.consolidated_to:  # the new parameters came with state
            engine.progress.changed()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """For copy, deepcopy and pickle: a copy would share process groups, hooks and buffers with this one."""
        raise TypeError(
            "a ZeroRedundancyOptimizer cannot be copied or pickled: its state is spread over the ranks. Build another "
            "one and load the state: other.load_state_dict(optimizer.state_dict())."
        )

    # --- tools ----------------------------------------------------------------------------------------------------

    def check_replicas(self) -> None:
        """Raise on every rank, naming the first parameter and the ranks that differ, unless all hold the same bits.

        Collective: call on every rank of the group.
        """
        sharded = self.engine.sharded
        self.engine.check_not_broken("check_replicas")
        self.engine.consensus.check_equal("check_replicas", [])
        replicas.check(sharded.ranks.everyone, sharded.layout, sharded.params)

    @property
    def layout(self) -> Layout:
        """Which piece of which parameter lies in which bucket, owned by which rank."""
        return self.engine.sharded.layout

    def memory(self) -> MemoryReport:
        """Bytes of parameters, gradients, state, masters and buffers of this rank, measured on its live tensors."""
        sharded, source = self.engine.sharded, self.engine.source
        kept, scratch = sharded.masters.memory(), sharded.masters.scratch()
        params, state = sharded.params.values(), self.optim.state
        return view.measure(params, state, source.tensors(), kept, scratch, source.buffers())


_ARGUMENTS = [name for name in inspect.signature(ZeroRedundancyOptimizer).parameters if name != "defaults"]

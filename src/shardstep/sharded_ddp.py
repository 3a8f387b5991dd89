"""Gradients sharded under DDP, at DDP's own volume: ``shard_ddp_gradients`` and ``reduce_scatter_hook``.

DDP's buckets feed our reducer instead of an all-reduce (``grads/ddp_feed.py``): each rank gets the sum of its own
share.
"""
# No ``from __future__ import annotations``: DDP compares the annotations of a hook with the types themselves.

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from shardstep.comm import process_group
from shardstep.comm.collectives import GradBucket
from shardstep.comm.process_group import Group
from shardstep.comm.rank_groups import RankGroups
from shardstep.grads.ddp_buckets import DdpBucketGradients
from shardstep.grads.ddp_feed import DdpFeed
from shardstep.grads.ddp_reduced import DdpReducedGradients
from shardstep.grads.reduced_gradients import ReducedGradients
from shardstep.optimizer import ZeroRedundancyOptimizer
from shardstep.params.model_search import ddp_modules_of, params_of_ddp
from shardstep.state.dicts import unwrapped


def shard_ddp_gradients(ddp: torch.nn.Module, *optimizers: ZeroRedundancyOptimizer) -> None:
    """Have the gradients of a DDP module reduced to their owners instead of to everybody (ZeRO-2 under DDP).

    Collective: call on every rank, after the optimizers are built and before the first backward. DDP keeps its wrapper,
    ``no_sync``, buffers, ``find_unused_parameters``, ``static_graph`` and Join (list the optimizers after it). After
    backward ``param.grad`` is a ``ShardedGradient``. With the gather of a step, as much is sent as by DDP alone. The
    same call once more changes nothing.

    Args:
        ddp: the wrapped model, or what a framework hands out for it: the module inside, or one around it. It must not
            have a communication hook yet.
        *optimizers: one or several over disjoint parameters of it. What none of them has is all-reduced as usual.

    Examples:
        ```python
        ddp = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3)
        shardstep.shard_ddp_gradients(ddp, optimizer)
        ```
    """
    call = "shard_ddp_gradients"
    wrapper = _ddp_of(call, ddp)
    found = _optimizers_of(call, optimizers, wrapper.parameters)
    if _is_connected(found, wrapper):
        return
    _check(call, found, wrapper)
    wrapper.register_comm_hook(tuple(found), reduce_scatter_hook)
    _connect(found, wrapper)


def reduce_scatter_hook(
    state: ZeroRedundancyOptimizer | Sequence[ZeroRedundancyOptimizer], bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A DDP hook that reduces gradients to their owners: ``ddp.register_comm_hook(optimizer, reduce_scatter_hook)``.

    ``shard_ddp_gradients`` registers it, and tells wrong use at once; registered by hand it does so at the first
    backward, before anything is sent. ``hook_with_zero_step`` and ``hook_with_zero_step_interleaved`` take it as the
    hook that reduces, and give it their optimizer.

    Args:
        state: the optimizer, or several over disjoint parameters.
        bucket: one of DDP's buckets.
    """
    call = "reduce_scatter_hook"
    optimizers = _optimizers_of(call, state if isinstance(state, Sequence) else (state,), bucket.parameters)
    feed = _feed_of(optimizers)
    if feed is None:
        feed = _connect(optimizers, _check(call, optimizers, None))
    return feed.take(bucket)


def connect_stepping_hook(call: str, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer) -> DdpFeed:
    """Collective. Feed an optimizer that steps inside backward. No part of the API: for ``ddp_hooks.py``."""
    _check(call, [zero], ddp, steps=True)
    return _connect([zero], ddp)


def _ddp_of(call: str, model: Any) -> DistributedDataParallel:
    """The only DistributedDataParallel module in, or around, what was given."""
    if isinstance(model, DistributedDataParallel):
        return model
    found: list[DistributedDataParallel] = []
    if isinstance(model, torch.nn.Module):
        found = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        found = found or ddp_modules_of(model.parameters())
        if len(found) > 1:
            gc.collect()  # an earlier wrapper that nobody has any more
            found = [module for module in ddp_modules_of(model.parameters()) if module in found]
    if len(found) != 1:
        raise TypeError(
            f"{call} expects a DistributedDataParallel module but got a {type(model).__name__}, with {len(found)} of "
            "them in or around it. Wrap the model first."
        )
    return found[0]


def _optimizers_of(
    call: str, given: Sequence[Any], params: Callable[[], Iterable[torch.Tensor]]
) -> list[ZeroRedundancyOptimizer]:
    """The optimizers that were given. TypeError if one is none of ours, of which the ranks that have one hear.

    ``params``: parameters that theirs are over.
    """
    found = [unwrapped(optimizer) for optimizer in given]
    strange = [type(one).__qualname__ for one in found if not isinstance(one, ZeroRedundancyOptimizer)]
    if not strange and found:
        return found
    error = TypeError(
        f"{call} expects one or several optimizers of class shardstep.ZeroRedundancyOptimizer but got "
        f"{', '.join(strange) or 'none'}. Pass the optimizer of the model's parameters (to register_comm_hook: as "
        "the state)."
    )
    for optimizer in _optimizers_over(params()):
        optimizer.engine.consensus.report_failure(call, error)
    raise error


def _optimizers_over(params: Iterable[torch.Tensor]) -> list[ZeroRedundancyOptimizer]:
    """Those that this process has. To build one is collective, so what other ranks have is here, too."""
    params = list(params)
    # (isinstance would wake lazy objects. One that could not be built has no engine.)
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), ZeroRedundancyOptimizer)]
    built = [one for one in found if "engine" in vars(one)]
    return [one for one in built if any(param in one.engine.sharded.index_of for param in params)]


def _feed_of(optimizers: Sequence[ZeroRedundancyOptimizer]) -> DdpFeed | None:
    """The feed that these optimizers have together; None if they have none, or that of a DDP module that is gone."""
    sources = [optimizer.engine.source for optimizer in optimizers]
    feeds = {source.feed if isinstance(source, DdpReducedGradients) else None for source in sources}
    feed = feeds.pop()
    return feed if not feeds and isinstance(feed, DdpFeed) and not feed.is_orphaned else None


def _is_connected(optimizers: Sequence[ZeroRedundancyOptimizer], ddp: DistributedDataParallel) -> bool:
    """Whether this was asked for before: a framework may begin to train several times."""
    feed = _feed_of(optimizers)
    sources = [one.engine.source for one in optimizers if isinstance(one.engine.source, DdpReducedGradients)]
    return feed is not None and feed.connects(ddp, sources)


def _connect(optimizers: Sequence[ZeroRedundancyOptimizer], ddp: DistributedDataParallel | None) -> DdpFeed:
    """Collective. From now on the gradients of these optimizers come from DDP's hook."""
    members, find_unused = [], ddp is None or ddp.find_unused_parameters or ddp.static_graph
    for optimizer in optimizers:
        engine, source = optimizer.engine, optimizer.engine.source
        if not isinstance(source, DdpReducedGradients):  # (else the model was wrapped anew)
            source = DdpReducedGradients(engine.sharded, engine.consensus, optimizer.attendance, find_unused)
            source.extend()
            engine.take_gradients_from(source)
        members.append((source, engine.sharded))
    group = (
        process_group.open_group(ddp.process_group) if ddp is not None else optimizers[0].engine.sharded.ranks.everyone
    )
    feed = DdpFeed(ddp, group, members)
    for source, _ in members:
        source.feed = feed
    return feed


# --- wrong use --------------------------------------------------------------------------------------------------------


def _check(
    call: str, optimizers: Sequence[ZeroRedundancyOptimizer], ddp: DistributedDataParallel | None, steps: bool = False
) -> DistributedDataParallel | None:
    """Collective. An error on every rank if gradients cannot be sharded so. The DDP module, which may not be given."""
    consensus = optimizers[0].engine.consensus
    with consensus.reporting(call):
        for optimizer in optimizers:
            _check_mode(call, optimizer, steps)
        _check_disjoint(call, optimizers)
        ddp = _check_wrapped_once(call, optimizers, ddp)
        if ddp is not None:
            for optimizer in optimizers:
                _check_fits(call, optimizer, ddp)
    settings = ("gradient_as_bucket_view", "find_unused_parameters", "static_graph")
    facts = {name: str(getattr(ddp, name, None)) for name in settings}
    consensus.check_equal(call, [("argument", {"optimizers": str(len(optimizers)), **facts})])
    return ddp


def _check_mode(call: str, optimizer: ZeroRedundancyOptimizer, steps: bool) -> None:
    source = optimizer.engine.source
    is_ours = isinstance(source, DdpReducedGradients)
    if is_ours and isinstance(source.feed, DdpFeed) and not source.feed.is_orphaned:
        once = "Make one hook for an optimizer" if steps else "Call it once for a DDP module, with all its optimizers"
        raise ValueError(
            f"{call} expects an optimizer that is in no other call of it, but the gradients of this one are sharded "
            f"already. {once}. (If the model was wrapped again, delete the earlier wrapper first.)"
        )
    if isinstance(source, ReducedGradients) and not is_ours:
        raise ValueError(
            f"{call} expects an optimizer without shard_gradients=True, which is for models that are not wrapped in "
            "DDP. Drop shard_gradients."
        )
    if (isinstance(source, DdpBucketGradients) or (is_ours and source.has_hook)) and not steps:
        raise ValueError(
            f"{call} expects an optimizer without overlap_with_ddp=True, with which a stepping hook steps inside "
            "backward. Drop overlap_with_ddp, or register hook_with_zero_step(reduce_scatter_hook, ddp, optimizer)."
        )
    if not (is_ours or source.may_be_replaced):
        raise ValueError(f"{call} expects an optimizer without another stepping hook. Make one hook for an optimizer.")


def _check_disjoint(call: str, optimizers: Sequence[ZeroRedundancyOptimizer]) -> None:
    seen: set[torch.Tensor] = set()
    for optimizer in optimizers:
        sharded = optimizer.engine.sharded
        for param, index in sharded.index_of.items():
            if param in seen:
                raise ValueError(
                    f"{call} expects optimizers over disjoint parameters, but {sharded.layout.spec_of[index].label} is "
                    "in two of them. Give it to one."
                )
            seen.add(param)


def _check_wrapped_once(
    call: str, optimizers: Sequence[ZeroRedundancyOptimizer], ddp: DistributedDataParallel | None
) -> DistributedDataParallel | None:
    """The only DDP module that has the parameters; None if there is none to be found."""
    params = [param for optimizer in optimizers for param in optimizer.engine.sharded.params.values()]
    if len(ddp_modules_of(params)) > 1:
        gc.collect()  # an earlier wrapper that nobody has any more
    found = ddp_modules_of(params)
    if any(module is not ddp for module in found[1:] + found[:1] * (ddp is not None)):
        raise ValueError(
            f"{call} expects a model that is wrapped in DistributedDataParallel once, but its parameters are in "
            f"{len({*map(id, found), id(ddp)})} such modules. Wrap it once, and delete earlier wrappers."
        )
    return ddp if ddp is not None else next(iter(found), None)


def _check_fits(call: str, optimizer: ZeroRedundancyOptimizer, ddp: DistributedDataParallel) -> None:
    sharded = optimizer.engine.sharded
    _check_ranks(call, sharded.ranks, process_group.open_group(ddp.process_group))
    reduced = params_of_ddp(ddp)
    for index, param in sharded.params.items():
        if param.requires_grad and param not in reduced:
            raise ValueError(
                f"{call} expects an optimizer over parameters of the DDP module, which it reduces, but "
                f"{sharded.layout.spec_of[index].label} is {_strangeness(ddp, param)}. Have DDP reduce it, or drop it."
            )
    sharded.check_lies_as_placed(call)


def _strangeness(ddp: DistributedDataParallel, param: torch.Tensor) -> str:
    is_ignored = any(param is one for one in ddp.parameters())
    return "one that DDP was told to ignore" if is_ignored else "none of its"


def _check_ranks(call: str, ranks: RankGroups, reduced: Group) -> None:
    """ValueError unless DDP reduces over the ranks of the optimizer: no fewer, no others."""
    if process_group.same_ranks(reduced, ranks.everyone):
        return
    if ranks.mesh is None:
        raise ValueError(
            f"{call} expects an optimizer over the ranks that DDP reduces over, but its process_group has other ones. "
            "Pass the same process_group to both."
        )
    theirs, ours = (process_group.rank_numbers(process_group.ranks_of(one)) for one in (reduced, ranks.everyone))
    raise ValueError(
        f"{call} expects DDP to reduce over all ranks of the optimizer's mesh {ranks.describe()}, but DDP has global "
        f"{theirs} and the mesh {ours}. Build DDP over all ranks of the mesh, not over one dimension of it."
    )

"""What one rank contributes to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from shardstep.checkpoint.adapter import OptimizerAdapter
from shardstep.checkpoint.keys import EXTRA, GROUPS, MODEL, OPTIM, STATE
from shardstep.checkpoint.leaves import is_tensor_tree, leaved, map_leaves, with_leaves
from shardstep.checkpoint.snapshot import Snapshot
from shardstep.comm.codec import plain_option
from shardstep.comm.process_group import Group
from shardstep.comm.streams import Mark
from shardstep.layout.shares import Share
from shardstep.layout.specs import Piece
from shardstep.params.dtensors import plain_tensor
from shardstep.params.memory_order import order_of
from shardstep.state import names as named
from shardstep.state.names import clean, names_of, unwrapped
from shardstep.state.shards import StateShard, shard_of_range, shard_of_whole


@dataclass
class Contribution:
    """What one rank saves: its own dict for DCP, and what must be known to make one checkpoint of all."""

    form: dict[str, Any]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of all parameters
    orders: dict[str, list[int]] = field(default_factory=dict)  # of tensors with another order in memory, by key
    snapshot: Snapshot | None = None  # the copies that the form is made of, if some are under way

    def stage(self, hold_state: Callable[[Sequence[Mark]], None]) -> None:
        """Replace everything by a copy on the CPU, so that training can go on. See [Note: who waits for the copies].

        ``hold_state`` sees to it that the state is not changed before it is copied.
        """
        self.snapshot = snapshot = Snapshot()
        rest, state = {**self.form, OPTIM: {**self.form[OPTIM]}}, self.form[OPTIM][STATE]
        del rest[OPTIM][STATE]
        with self.abandoned_on_failure():
            form = map_leaves(rest, snapshot.copied)
            snapshot.hold_back()
            form[OPTIM][STATE] = map_leaves(state, snapshot.copied)
            hold_state(snapshot.seal())
        self.form, self.snapshot = form, snapshot if snapshot.is_under_way else None

    @contextmanager
    def abandoned_on_failure(self) -> Iterator[None]:
        """If it is not saved after all, it goes, with what is still copied: what follows on the device comes after."""
        try:
            yield
        except BaseException:
            if self.snapshot is not None:
                self.snapshot.hold_back()
            raise


def contribution_of(adapted: OptimizerAdapter, model: Module | None, extra: Mapping[str, Any] | None) -> Contribution:
    """What this rank saves of an optimizer, its model and anything else."""
    names = names_of(adapted.optimizer.param_groups, model)
    optim = _optimizer_part(adapted, names)
    form: dict[str, Any] = {OPTIM: optim}
    if model is not None:
        form[MODEL] = with_leaves(_model_part(model, adapted.group))
    if extra is not None and adapted.group.rank == 0:
        form[EXTRA] = {key: leaved(value) for key, value in extra.items()}
    shapes = {names[adapted.held.given[spec.index]]: spec.shape for spec in adapted.held.layout.specs}
    return Contribution(form, shapes, dict(_orders_in(optim[STATE], OPTIM, STATE)))


def _optimizer_part(adapted: OptimizerAdapter, names: Mapping[Tensor, str]) -> dict[str, Any]:
    form = named.named_form(adapted.optimizer.param_groups, names, adapted.held, adapted.local, blanks=False)
    _keep_what_this_rank_writes(form[STATE], adapted)
    # A group is written by a rank that has a piece of it: into an empty one some optimizers write nothing.
    writers = [owners[0] if owners else 0 for owners in adapted.held.group_owners()]
    ranks = adapted.ranks
    groups = {
        position: with_leaves(_plain_options(group))
        for position, (group, writer) in enumerate(zip(form[GROUPS], writers, strict=True))
        if writer == ranks.shard.rank and ranks.replica == 0
    }
    return {STATE: {name: leaved(entry) for name, entry in form[STATE].items()}, GROUPS: groups}


def _plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of classes and functions only the names are saved: an optimizer that is built has its own."""
    return {key: plain_option(value) for key, value in group.items()}


def _keep_what_this_rank_writes(state: dict[str, Any], adapted: OptimizerAdapter) -> None:
    """Of a value that every owner of a piece has, the owner of the first writes it; of what all have, rank 0.

    Of a shard that several replicas hold, each writes an equal share.
    """
    names, pieces, ranks = iter(list(state)), adapted.held.pieces.pieces, adapted.ranks
    share = Share(sum(piece.numel for piece in pieces.values()), ranks.replica, ranks.replicas)
    start = 0  # of the piece, among the elements of the shard
    for index in adapted.held.given:
        name, piece = next(names), pieces.get(index)
        if piece is not None:
            state[name] = dict(_written(state[name], piece, share, start))
            start += piece.numel
        if not state[name]:
            del state[name]
    for name in names:
        if adapted.group.rank != 0:
            del state[name]


def _written(entry: Mapping[str, Any], piece: Piece, share: Share, start: int) -> Iterator[tuple[str, Any]]:
    """What this rank writes of the state of its piece, which begins at ``start`` of the shard."""
    mine = share.within(start, start + piece.numel)
    for key, value in entry.items():
        if share.count > 1 and _can_be_divided(value, piece):
            if mine.start < mine.stop:
                low, high = piece.start + mine.start, piece.start + mine.stop
                yield key, shard_of_range(tuple(value.shape), low, high, value.local.reshape(-1)[mine])
        elif share.has_start(start) and (piece.start == 0 or is_tensor_tree(value)):
            yield key, value


def _can_be_divided(value: Any, piece: Piece) -> bool:
    """Whether it is a tensor with as many elements as the piece, which lie in its memory one after the other."""
    return isinstance(value, StateShard) and value.local.numel() == piece.numel > 1 and value.local.is_contiguous()


def _orders_in(value: Any, *path: str) -> Iterator[tuple[str, list[int]]]:
    """The tensors of a tree whose dimensions lie in another order in memory, by key: a copy must have it, too."""
    if isinstance(value, (Mapping, list)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _orders_in(item, *path, str(key))
    elif isinstance(value, StateShard) and value.local.shape == value.shape:
        order = order_of(value.local)
        if order is not None:
            yield ".".join(path), order


def _model_part(model: Module, group: Group) -> dict[str, Any]:
    """This rank's share of the model: of all parameters an equal range of elements; rank 0 has the rest.

    (Parameters are the same on every rank. Buffers may differ: rank 0's count, as in DistributedDataParallel.)
    """
    entries = {clean(key): value for key, value in unwrapped(model).state_dict(keep_vars=True).items()}
    params = {key: plain_tensor(value).detach() for key, value in entries.items() if isinstance(value, Parameter)}
    share = Share(sum(param.numel() for param in params.values()), group.rank, group.world_size)
    part: dict[str, Any] = {}
    start = 0
    for key, param in params.items():
        stop = start + param.numel()
        mine = share.within(start, stop)
        if not param.is_contiguous() or param.numel() == 0:
            if share.has_start(start):
                part[key] = shard_of_whole(param)
        elif mine.start < mine.stop:
            local = param.view(-1)[mine]
            part[key] = shard_of_range(tuple(param.shape), mine.start, mine.stop, local)
        start = stop
    if group.rank == 0:
        part.update((key, _detached(value)) for key, value in entries.items() if key not in params)
    return part


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value

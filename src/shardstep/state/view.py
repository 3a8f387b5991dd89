"""The state as users see it: keyed by their parameters, and counted in bytes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from shardstep.params.progress import Progress
from shardstep.params.sharded_parameters import ShardedParameters
from shardstep.state.subclasses import opened


class StateView(MutableMapping[Any, Any]):
    """The local optimizer's state, keyed by the user's parameters.

    Reads and writes go through: nothing is kept here. Every parameter has an entry on every rank, empty where
    this rank owns nothing of it, so that tools see the same keys everywhere. Of a cut parameter the entry is the
    state of this rank's piece. Keys that are no tensors, which some optimizers use, are passed on.
    """

    def __init__(self, sharded: ShardedParameters, local: Optimizer, progress: Progress) -> None:
        self._sharded = sharded
        # A real reference would keep all state alive until the garbage collector runs.
        self._local = weakref.proxy(local)
        self._progress = progress

    def __getitem__(self, key: Any) -> Any:
        """As in torch, a missing entry is made, so that it can be filled."""
        self._progress.copies.wait()  # the caller may write into it
        own = self._own(key)
        return self._look_up(key) if own is None else self._local.state.setdefault(own, {})

    def _own(self, key: Any) -> Any:
        """The key in the local optimizer's state; None for a parameter of which this rank owns nothing."""
        if not isinstance(key, Tensor):
            return key
        return self._sharded.pieces.tensors.get(self._sharded.index_of.get(key, -1))

    def get(self, key: Any, default: Any = None) -> Any:
        return self._look_up(key) if key in self else default

    def items(self) -> Any:
        """Like ``values``, without making entries."""
        return {key: self._look_up(key) for key in self}.items()

    def values(self) -> Any:
        return [self._look_up(key) for key in self]

    def _look_up(self, key: Any) -> Any:
        self._progress.copies.wait()
        if key not in self:
            raise KeyError(key)
        own = self._own(key)
        return self._local.state[key] if not isinstance(key, Tensor) else self._local.state.get(own, {})

    def __contains__(self, key: Any) -> bool:
        return key in self._sharded.index_of if isinstance(key, Tensor) else key in self._local.state

    def __setitem__(self, key: Any, value: Any) -> None:
        self._progress.changed()
        own = self._own(key)
        if own is not None:
            self._local.state[own] = value
        elif key not in self or value:
            raise KeyError("state expects a parameter that this rank owns a piece of. Use load_state_dict instead.")

    def __delitem__(self, key: Any) -> None:
        self._progress.changed()
        self._local.state.pop(self._own(key), None)

    def clear(self) -> None:
        """Forget all state of this rank. (Entries stay, empty, so the inherited loop would never end.)"""
        self._progress.changed()
        self._local.state.clear()

    def __iter__(self) -> Iterator[Any]:
        yield from self._sharded.index_of
        yield from (key for key in self._local.state if not isinstance(key, Tensor))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"StateView({dict(self.items())!r})"


class MemoryReport(NamedTuple):
    """Bytes that this rank holds, measured on its live tensors.

    Attributes:
        parameters: of the model, which every rank has whole.
        gradients: those in ``param.grad``; with ``shard_gradients`` this rank's share; with ``shard_ddp_gradients``
            that and DDP's buckets.
        state: of the local optimizer.
        masters: with ``master_weights``: what is kept of the masters between steps.
        scratch: with ``master_weights``: memory that updates use, one bucket after the other. An optimizer whose step
            cannot be split uses it for all at once.
        buffers: with sharded gradients on an accelerator: memory in which buckets are packed, and which is kept:
            ``gradient_buckets_in_flight`` times the largest bucket.
    """

    parameters: int
    gradients: int
    state: int
    masters: int = 0
    scratch: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        return sum(self)


def measure(
    params: Iterable[Tensor],
    state: Mapping[Any, Any],
    sharded: Sequence[Tensor],
    masters: Sequence[Tensor] = (),
    scratch: Sequence[Tensor] = (),
    buffers: Sequence[Tensor] = (),
) -> MemoryReport:
    """Bytes of distinct memory behind parameters, their gradients, the state of the local optimizer, masters, buffers.

    ``sharded``: gradients that are not on the parameters. (A sharded gradient there has no memory of its own.)
    """
    params = list(params)
    gradients = [param.grad for param in params if type(param.grad) is Tensor]
    gradients += sharded
    state_tensors = [leaf for leaf in tree_leaves(opened(list(state.values()))) if isinstance(leaf, Tensor)]
    kinds = (params, gradients, state_tensors, masters, scratch, buffers)
    return MemoryReport(*map(_bytes, kinds))


def _bytes(tensors: Iterable[Tensor]) -> int:
    sizes: dict[tuple[torch.device, int], int] = {}
    for tensor in tensors:
        key = tensor.device, tensor.data_ptr()
        sizes[key] = max(sizes.get(key, 0), tensor.nbytes)
    return sum(sizes.values())

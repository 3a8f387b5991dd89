"""The state as users see it, keyed by their parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardstep.params.progress import Progress


class StateView(MutableMapping[Any, Any]):
    """The local optimizer's state, keyed by the user's parameters.

    Reads and writes go through: nothing is kept here. Every parameter has an entry on every rank, empty where
    this rank owns nothing of it, so that tools see the same keys everywhere. Of a cut parameter the entry is the
    state of this rank's piece. Keys that are no tensors, which some optimizers use, are passed on.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        owned: Mapping[Tensor, Tensor],
        local: Optimizer,
        progress: Progress,
    ) -> None:
        self._params = dict.fromkeys(params)
        self._owned = owned  # the user's parameter -> the tensor that the local optimizer steps
        # A real reference would keep all state alive until the garbage collector runs.
        self._local = weakref.proxy(local)
        self._progress = progress

    def __getitem__(self, key: Any) -> Any:
        """As in torch, a missing entry is made, so that it can be filled."""
        self._progress.copies.wait()  # the caller may write into it
        if key in self._owned:
            return self._local.state.setdefault(self._owned[key], {})
        return self._look_up(key)

    def get(self, key: Any, default: Any = None) -> Any:
        return self._look_up(key) if key in self else default

    def items(self) -> Any:
        """Like ``values``, without making entries."""
        return {key: self._look_up(key) for key in self}.items()

    def values(self) -> Any:
        return [self._look_up(key) for key in self]

    def _look_up(self, key: Any) -> Any:
        self._progress.copies.wait()
        if not isinstance(key, Tensor):
            return self._local.state[key]
        if key not in self._params:
            raise KeyError(key)
        return self._local.state.get(self._owned[key], {}) if key in self._owned else {}

    def __contains__(self, key: Any) -> bool:
        return key in self._params if isinstance(key, Tensor) else key in self._local.state

    def __setitem__(self, key: Any, value: Any) -> None:
        self._progress.changed()
        if isinstance(key, Tensor) and key not in self._owned:
            if key in self._params and not value:
                return
            raise KeyError("state expects a parameter that this rank owns a piece of. Use load_state_dict instead.")
        self._local.state[self._owned.get(key, key)] = value

    def __delitem__(self, key: Any) -> None:
        self._progress.changed()
        self._local.state.pop(self._owned.get(key, key), None)

    def clear(self) -> None:
        """Forget all state of this rank. (Entries stay, empty, so the inherited loop would never end.)"""
        self._progress.changed()
        self._local.state.clear()

    def __iter__(self) -> Iterator[Any]:
        yield from self._params
        yield from (key for key in self._local.state if not isinstance(key, Tensor))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"StateView({dict(self.items())!r})"

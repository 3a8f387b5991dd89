"""Loading a model so that it can be undone, without a third copy of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from shardstep.params.dtensors import plain_tensor
from shardstep.state.names import clean, saved_names, unwrapped


class ModelSwap:
    """A model, and what was read for it.

    What is in memory and what was read change places, tensor by tensor. Then the model's own ``load_state_dict`` takes
    what is in place, for its hooks and extra state.
    """

    def __init__(self, model: Module, read: Mapping[str, Any], strict: bool) -> None:
        self._model, self._strict = unwrapped(model), strict
        now = self._model.state_dict()
        keys = {clean(key): key for key in now}
        pairs = [(keys[name], read[there]) for name, there in saved_names(keys, read).items()]
        self._chosen = {key: now[key] for key, _ in pairs}
        self._tensors = [(plain_tensor(now[key]), value) for key, value in pairs if isinstance(value, Tensor)]
        self._others = {key: value for key, value in pairs if not isinstance(value, Tensor)}
        self._before = {key: copy.deepcopy(now[key]) for key in self._others}

    def load(self) -> None:
        """Load the model. If that raises, it is undone."""
        for tensor, value in self._tensors:
            _swap(tensor, value)
        try:
            self._take(self._others)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        for tensor, value in reversed(self._tensors):  # (a tensor with two names is there twice)
            _swap(tensor, value)
        self._take(self._before)

    def _take(self, others: Mapping[str, Any]) -> None:
        self._model.load_state_dict({**self._chosen, **others}, strict=self._strict)


@torch.no_grad()
def _swap(one: Tensor, other: Tensor) -> None:
    before = one.detach().to(other.device, copy=True)
    one.copy_(other)
    other.copy_(before)

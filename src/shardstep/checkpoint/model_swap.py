"""Loading a model so that it can be undone, without a third copy of it.

Tensors of a device pass through pinned buffers, both ways, a window at a time: the host waits for a buffer now and
then, and not for every tensor. Tensors that share memory (tied weights) change places one after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardstep.comm.host_copies import BUFFER_BYTES, Uploads, on_host, view_as
from shardstep.comm.streams import has_streams
from shardstep.params.dtensors import plain_tensor
from shardstep.state.names import clean, saved_names, unwrapped

_Pair = tuple[Tensor, Tensor]  # of the model, and what was read for it


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
        tensors = [(plain_tensor(now[key]).detach(), value) for key, value in pairs if isinstance(value, Tensor)]
        self._streamed, self._single = _divided(tensors)
        self._others = {key: value for key, value in pairs if not isinstance(value, Tensor)}
        self._before = {key: copy.deepcopy(now[key]) for key in self._others}
        self._swapped: list[_Pair] = []  # so far: windows of what is streamed ...
        self._swapped_alone: list[_Pair] = []  # ... and the rest
        self._is_taken = False

    def load(self) -> None:
        """Load the model. If that raises, it is undone."""
        try:
            _swap_through_buffers(self._streamed, self._swapped)
            for pair in self._single:
                _swap(*pair)
                self._swapped_alone.append(pair)
            self._is_taken = True
            self._take(self._others)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        for pair in reversed(self._swapped_alone):  # (a tensor with two names is there twice)
            _swap(*pair)
        _swap_through_buffers(self._swapped, [])
        if self._is_taken:
            self._take(self._before)

    def _take(self, others: Mapping[str, Any]) -> None:
        self._model.load_state_dict({**self._chosen, **others}, strict=self._strict)


def _divided(pairs: Sequence[_Pair]) -> tuple[list[_Pair], list[_Pair]]:
    """Those of devices whose memory is no other one's, and the rest."""
    streamed: list[_Pair] = []
    single: list[_Pair] = []
    end: dict[torch.device, int] = {}
    for pair in sorted(pairs, key=lambda pair: _span(pair[0])[0]):
        tensor = pair[0]
        plain = has_streams(tensor.device) and tensor.numel() and not is_traceable_wrapper_subclass(tensor)
        start, stop = _span(tensor) if plain else (0, 0)
        if plain and start >= end.get(tensor.device, 0):
            streamed.append(pair)
        else:
            single.append(pair)
        end[tensor.device] = max(stop, end.get(tensor.device, 0))
    return streamed, single


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses between which a tensor lies."""
    if tensor.numel() == 0 or is_traceable_wrapper_subclass(tensor):
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


@torch.no_grad()
def _swap_through_buffers(pairs: Sequence[_Pair], swapped: list[_Pair]) -> None:
    """``swapped``: gets those windows that have changed places."""
    uploads = Uploads()
    windows = (window for pair in pairs for window in _windows(*pair))
    with closing(on_host((window, window[0]) for window in windows)) as on_their_way:
        for (tensor, value), before in on_their_way:
            assert before is not None
            place = view_as(uploads.room(value.nbytes), value)
            place.copy_(value)
            uploads.send(place, tensor)  # which was read, and the host has waited for that
            value.copy_(before)
            swapped.append((tensor, value))


def _windows(tensor: Tensor, value: Tensor) -> Iterator[_Pair]:
    """Parts of a bounded size, if they can be cut."""
    if not tensor.is_contiguous() or not value.is_contiguous():
        yield tensor, value
        return
    step = max(BUFFER_BYTES // tensor.itemsize, 1)
    yield from zip(tensor.view(-1).split(step), value.view(-1).split(step), strict=True)


@torch.no_grad()
def _swap(one: Tensor, other: Tensor) -> None:
    before = one.detach().to(other.device, copy=True)
    one.copy_(other)
    other.copy_(before)

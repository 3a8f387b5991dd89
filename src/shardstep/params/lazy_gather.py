"""Parameters whose new values are still on their way: whoever touches one waits for it, nobody else does.

After a lazy step the last gathers are under way while the program goes on. Until its gather is finished, a parameter's
class is ``InFlightParameter``: every torch function, method or attribute that would read or write it finishes the
gather first and makes it an ordinary ``Parameter`` again. So a forward waits bucket by bucket, and ``state_dict``, an
EMA, a checkpoint or a print never see a mixture.

There is no other way to protect readers that are no module: forward hooks would need the model, and would not see an
EMA. The parameter object must stay the one that the model has, so its class changes, as that of the parameters of
torch's own lazy modules does.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shardstep.params.gather_window import GatherFailed, GatherWindow

# What neither reads nor writes the value: zero_grad, say, must not make the program wait.
_HARMLESS = {
    accessor
    for name in ("grad", "requires_grad", "dtype", "device", "shape", "layout", "is_leaf", "ndim", "grad_fn")
    for accessor in (getattr(Tensor, name).__get__, getattr(Tensor, name).__set__, getattr(Tensor, name).__delete__)
} | {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.stride,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.is_contiguous,
    Tensor.element_size,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
}


class InFlightParameter(Parameter):
    """A parameter whose gather is not finished."""

    _arrive: Callable[[], None]  # finishes the gather and makes this an ordinary parameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _HARMLESS:
            for param in _in_flight([args, kwargs]):
                _await(param)
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        _await(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        _await(self)
        return self.__reduce_ex__(proto)

    def as_subclass(self, *args: Any, **kwargs: Any) -> Any:  # which torch asks nobody for
        _await(self)
        return self.as_subclass(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        _await(self)
        return repr(self)


def _await(param: InFlightParameter) -> None:
    arrive = vars(param).get("_arrive")  # gone if another parameter, or another thread, has brought it along
    if arrive is not None:
        arrive()


class LazyGathers:
    """The gathers of one step that are still under way, and the parameters that wait for them.

    Any thread may touch a parameter. One finishes the gather, and lets go of the interpreter while it waits; the others
    wait for that one. So a parameter becomes ordinary only when its value is there.
    """

    def __init__(self, gathers: GatherWindow, params_of: Callable[[int], list[Tensor]]) -> None:
        self._gathers = gathers
        self._lock = threading.RLock()  # reentrant: a signal handler may touch a parameter while this thread finishes
        self._failure: GatherFailed | None = None
        self._waiting: dict[int, list[Parameter]] = {}
        for position in gathers.in_flight:
            params = params_of(position)
            if set(map(type, params)) <= {Parameter}:
                self._waiting[position] = params  # type: ignore[assignment]
                _on_each(setattr, params, "_arrive", partial(self.finish, position))
                _on_each(setattr, params, "__class__", InFlightParameter)
        stuck = [position for position in gathers.in_flight if position not in self._waiting]
        if stuck:  # of another class, which cannot be made to wait
            self.finish(stuck[-1])

    def finish(self, through: int | None = None) -> None:
        """Finish all gathers up to that of bucket ``through`` (None: all): they were started in this order."""
        with self._lock:
            if self._failure is not None:  # that of another thread, for which this one has waited
                raise self._failure
            positions = self._gathers.in_flight
            if through is not None and through not in positions:  # another thread was faster, or an error drained all
                self._release(through)
                return
            try:
                while (under_way := self._gathers.in_flight) and (through is None or through in under_way):
                    position = under_way[0]
                    with torch._C.DisableTorchFunctionSubclass():  # putting a value in its place is no reading of it
                        self._gathers.finish_oldest()
                    if position not in self._gathers.in_flight:  # a large one travels in parts
                        self._release(position)
            except GatherFailed as failure:
                self._failure = failure
                for position in positions:  # nothing is to come any more: one error is enough
                    self._release(position)
                raise

    def _release(self, position: int) -> None:
        """(A signal handler may come here in the midst of it: what it finds waiting is waiting.)"""
        params = self._waiting.get(position, [])
        _on_each(setattr, params, "__class__", Parameter)
        deque(map(dict.pop, map(vars, params), repeat("_arrive"), repeat(None)), maxlen=0)
        self._waiting.pop(position, None)


def _on_each(call: Callable[..., Any], params: Sequence[Tensor], *arguments: Any) -> None:
    """``call(param, *arguments)`` for each, as a pass in C: it runs in every step."""
    deque(map(call, params, *map(repeat, arguments)), maxlen=0)


def _in_flight(value: Any) -> list[InFlightParameter]:
    if isinstance(value, InFlightParameter):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [param for item in value for param in _in_flight(item)]
    return []

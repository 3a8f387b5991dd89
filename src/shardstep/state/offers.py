"""Dicts for ``dcp.load`` with keys that a checkpoint may have or lack.

DCP reads exactly the keys that it is given: one that the checkpoint lacks is an error, one that it has besides is
ignored. Masters are in a checkpoint or not, whatever the optimizer keeps, so a dict of ours (an ``Offer``) has them if,
and only if, the checkpoint does.

What the checkpoint has is known to DCP's planner alone. It looks into the dict in ``set_up_planner(state_dict,
metadata, is_coordinator)``, a public method of every planner (torch 2.6 to 2.15), so an ``Offer`` that is
asked for its items looks whether it is that method that asks, and reads these two arguments. Why there is no other way:
DCP decides by the key, before it looks at the value; it passes on nothing of the checkpoint to what is in the
dict; and a planner, or a list of keys, would have to be passed by every user in every call.

Without this file ``dcp.load`` of a checkpoint without masters needs ``DefaultLoadPlanner(allow_partial_load=True)``,
and masters are dropped without a word where none are kept. If a later torch renames the arguments, nothing is
found and that is what happens.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, ItemsView, Iterator, Mapping
from types import FrameType
from typing import Any

_ASKING = "set_up_planner"
_DEPTH = 28  # frames to look at: DCP walks through the dict by recursion


class Offer(dict[str, Any]):
    """A dict, with some keys that are there while DCP loads if the checkpoint has them, and gone if not."""

    def __init__(self, entries: Mapping[str, Any], optional: Mapping[str, Callable[[], Any]]) -> None:
        """``optional``: the keys, and what makes a place to load into if ``entries`` has none."""
        super().__init__(entries)
        self._optional = dict(optional)
        self._settled: Callable[[], Any] = lambda: None  # for which checkpoint: a weak reference to its metadata

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        frame = _frame_that_loads()
        if frame is not None and self._settled() is not frame.f_locals["metadata"]:
            _settle_all(frame.f_locals["state_dict"], frame.f_locals["metadata"])
        return super().items()

    def settle(self, path: tuple[str, ...], metadata: Any) -> None:
        """Have the optional keys that the checkpoint has below ``path``."""
        self._settled = weakref.ref(metadata)
        for key, make in self._optional.items():
            if ".".join((*path, key)) not in metadata.state_dict_metadata:
                self.pop(key, None)
            elif key not in self:
                self[key] = make()

    def copy(self) -> Offer:
        return Offer(self, self._optional)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, here or in another process, is a plain dict."""
        return dict, (dict(self),)


def _settle_all(tree: Any, metadata: Any) -> None:
    """All at once: an offer does not know where it is."""
    for path, offer in list(_offers_in(tree, ())):
        offer.settle(path, metadata)


def _offers_in(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Offer]]:
    if isinstance(value, Offer):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _offers_in(item, (*path, str(key)))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from _offers_in(item, (*path, str(position)))


def _frame_that_loads() -> FrameType | None:
    """The call of a planner that looks into the dict before it loads, if it is one that asks."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            return None
        found = frame.f_locals if frame.f_code.co_name == _ASKING else {}
        if hasattr(found.get("metadata"), "state_dict_metadata") and "state_dict" in found:
            return frame
        frame = frame.f_back
    return None

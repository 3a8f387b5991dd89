"""Equal shares of elements that lie one after the other: who of several that all have them writes which."""

from __future__ import annotations

from typing import NamedTuple


class Share(NamedTuple):
    """One of ``count`` equal shares of ``total`` elements."""

    total: int
    position: int
    count: int

    @property
    def low(self) -> int:
        return self.total * self.position // self.count

    @property
    def high(self) -> int:
        return self.total * (self.position + 1) // self.count

    def within(self, start: int, stop: int) -> slice:
        """Of the elements from ``start`` to ``stop``, counted from ``start``: those in the share. May be empty."""
        low = min(max(self.low, start), stop)
        return slice(low - start, max(min(self.high, stop), low) - start)

    def has_start(self, start: int) -> bool:
        """Whether what begins at ``start``, and is not to be cut, is in this share. (At the very end: in the first.)"""
        return self.low <= start < self.high or (self.position == 0 and start >= self.total)

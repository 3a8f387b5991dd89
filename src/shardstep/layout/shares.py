"""Nearly equal shares of elements that lie one after the other: who of several sends which, or writes which."""

from __future__ import annotations

from typing import NamedTuple


def share(total: int, count: int, position: int) -> tuple[int, int]:
    """The range of one of ``count`` shares of ``total`` elements."""
    return total * position // count, total * (position + 1) // count


class Share(NamedTuple):
    """One of ``count`` equal shares of ``total`` elements."""

    total: int
    position: int
    count: int

    @property
    def low(self) -> int:
        return share(self.total, self.count, self.position)[0]

    @property
    def high(self) -> int:
        return share(self.total, self.count, self.position)[1]

    def within(self, start: int, stop: int) -> slice:
        """Of the elements from ``start`` to ``stop``, counted from ``start``: those in the share. May be empty."""
        low = min(max(self.low, start), stop)
        return slice(low - start, max(min(self.high, stop), low) - start)

    def has_start(self, start: int) -> bool:
        """Whether what begins at ``start``, and is not to be cut, is in this share. (At the very end: in the first.)"""
        return self.low <= start < self.high or (self.position == 0 and start >= self.total)

"""Of a product of parameters, the fewest (nearly) in which every pair of values still meets, or every value is."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations


def covering(rows: Sequence[Mapping[str, Hashable]], size: int = 2) -> list[int]:
    """Positions of rows that together have every pair of values that some row has (``size`` 1: every value).

    Always the same ones. Greedy: the row with the most pairs that are missing, the first of several.
    """
    pairs = [set(combinations(sorted(row.items(), key=lambda item: item[0]), size)) for row in rows]
    missing = set[tuple]().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda position: (len(pairs[position] & missing), -position))
        chosen.append(best)
        missing -= pairs[best]
    return sorted(chosen)

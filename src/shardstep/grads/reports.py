"""What ranks report with a part of a bucket: its iteration, which part it is, and which parameters have a gradient.

Two bytes and a bit per parameter. Numbers are counted modulo 251.
"""

from __future__ import annotations

from collections.abc import Sequence

NUMBERS = 251


def report(iteration: int, part: int, present: Sequence[bool] | None, count: int) -> bytes:
    """``present``: by parameter of the bucket, of which there are ``count``; None: all are."""
    flags = b"\xff" * flag_bytes(count) if present is None else _packed(present)
    return bytes([iteration % NUMBERS, part % NUMBERS]) + flags


def report_bytes(count: int) -> int:
    """The length of a report about so many parameters."""
    return 2 + flag_bytes(count)


def flag_bytes(count: int) -> int:
    return -(-count // 8)


def are_about_the_same(reports: Sequence[bytes]) -> bool:
    """Whether all are of the same iteration, and about the same part."""
    return len({one[:2] for one in reports}) == 1


def distances(reports: Sequence[bytes], iteration: int) -> list[int]:
    """How many iterations each is ahead of mine; more than half of all numbers: it is behind."""
    return [(one[0] - iteration) % NUMBERS for one in reports]


def parts(reports: Sequence[bytes]) -> list[int]:
    """Which part each is about."""
    return [one[1] for one in reports]


def present_anywhere(reports: Sequence[bytes], count: int) -> list[bool]:
    """By parameter: whether any rank has a gradient."""
    return [any(one[2 + place // 8] >> place % 8 & 1 for one in reports) for place in range(count)]


def _packed(flags: Sequence[bool]) -> bytes:
    bits = "".join("1" if flag else "0" for flag in reversed(flags))
    return int(bits or "0", 2).to_bytes(flag_bytes(len(flags)), "little")

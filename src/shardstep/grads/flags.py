"""Flags as bits: for which of its parameters a rank has a gradient, in a report."""

from __future__ import annotations

from collections.abc import Iterable


def flag_bytes(count: int) -> int:
    """How many bytes so many flags take."""
    return -(-count // 8)


def all_set(count: int) -> bytes:
    return b"\xff" * flag_bytes(count)


def packed(flags: Iterable[bool]) -> bytes:
    bits = "".join("1" if flag else "0" for flag in flags)
    return int(bits[::-1] or "0", 2).to_bytes(flag_bytes(len(bits)), "little")


def unpacked(data: bytes, count: int) -> list[bool]:
    """The first ``count`` flags of what was packed."""
    return [bool(data[position // 8] >> position % 8 & 1) for position in range(count)]

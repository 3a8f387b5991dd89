"""What a layout plans for each rank, as values and as text."""

from __future__ import annotations

from typing import NamedTuple

from shardstep.layout.specs import Layout


class RankPlan(NamedTuple):
    """What one rank owns, according to the layout."""

    rank: int
    elements: int
    trainable_elements: int
    bytes: int


def plan(layout: Layout) -> list[RankPlan]:
    """What each rank owns."""
    return [
        RankPlan(
            rank,
            layout.owned_elements(rank),
            layout.owned_elements(rank, trainable_only=True),
            layout.owned_bytes(rank),
        )
        for rank in range(layout.world_size)
    ]


def layout_text(layout: Layout) -> str:
    """The layout in a few lines, for the log."""
    rows = plan(layout)
    elements = sum(row.elements for row in rows)
    mean = elements / layout.world_size
    balance = max(row.elements for row in rows) / mean if mean else 1.0
    lines = [
        f"{len(layout.specs)} parameters, {elements} elements in {len(layout.buckets)} buckets over "
        f"{layout.world_size} ranks, max/mean {balance:.4f}, digest {layout.digest[:12]}"
    ]
    lines += [
        f"  rank {row.rank}: {row.elements} elements ({row.trainable_elements} trainable), {row.bytes} bytes"
        for row in rows
    ]
    lines += [
        f"  bucket {bucket.position}: {len(bucket.params)} parameters, {bucket.numel} elements, "
        f"{bucket.numel * bucket.itemsize} bytes of {bucket.dtype} on {bucket.device}"
        for bucket in layout.buckets
    ]
    return "\n".join(lines)

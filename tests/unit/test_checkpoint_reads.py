"""How much a rank reads of a checkpoint of a large model, computed from the layouts: no data is needed for that."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import pytest

from shardstep.checkpoint.storage.manifest import block_for
from shardstep.layout.boxes import boxes_of
from shardstep.layout.partition import partition
from shardstep.layout.specs import ParamSpec

Shape = tuple[int, ...]
CAP = 25 * 2**20
FRAMED = 8 * 1024  # an item up to this size, with what surrounds the elements, is read whole


def transformer(layers: int, width: int, inner: int, vocabulary: int) -> list[Shape]:
    layer: list[Shape] = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner)] + [(width,)] * 2
    return [(vocabulary, width), *layer * layers, (width,), (vocabulary, width)]


MODELS = {
    "128 equal matrices": [(512, 512)] * 128,
    "124M": transformer(12, 768, 3072, 50257),
    "1.3B": transformer(24, 2048, 5504, 32000),
    "7B": transformer(32, 4096, 11008, 32000),
}


def ranges(shape: Shape, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The items in which a piece is saved, as ranges of elements."""
    for box in boxes_of(shape, start, stop):
        yield start, start + box.numel
        start += box.numel


def bytes_for(low: int, high: int, size: int) -> int:
    """What is read for the bytes from ``low`` to ``high`` of an item of ``size``: whole blocks, to be checked."""
    if size + 2048 <= FRAMED:
        return size
    block = block_for(size)
    return min(-(-high // block) * block, size) - low // block * block


@pytest.mark.parametrize(("saved", "now"), [(4, 3), (8, 6), (6, 8), (16, 24), (64, 48)])
@pytest.mark.parametrize("model", MODELS)
def test_a_rank_reads_its_share_and_one_percent(model: str, saved: int, now: int) -> None:
    shapes = MODELS[model]
    specs = [ParamSpec(i, shape, prod(shape), "float32", 4, "cpu#0") for i, shape in enumerate(shapes)]
    before, after = partition(specs, saved, CAP), partition(specs, now, CAP)
    items: dict[int, list[tuple[int, int]]] = {}
    for rank in range(saved):
        for piece in before.pieces(rank):
            items.setdefault(piece.param, []).extend(ranges(shapes[piece.param], piece.start, piece.stop))
    share = sum(map(prod, shapes)) * 4 / now
    for rank in range(now):
        read = 0
        for piece in after.pieces(rank):
            for low, high in ranges(shapes[piece.param], piece.start, piece.stop):
                for first, last in items[piece.param]:
                    if max(low, first) < min(high, last):
                        inside = (max(low, first) - first) * 4, (min(high, last) - first) * 4
                        read += bytes_for(*inside, (last - first) * 4)
        # 1 %, and what cuts on multiples of 64 elements take from the balance: up to 1/256 (see partition.py).
        assert read <= (1.01 + 1 / 256) * share, f"rank {rank} reads {read / share:.4f} of its share"

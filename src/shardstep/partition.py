"""From parameter specs to a layout. Pure functions: the same input gives the same layout on every rank.

"tensor" keeps parameters whole: the largest first, each to the rank that holds least so far.
"element" lays parameters into buckets and cuts each bucket into equal shards, wherever the cut falls.

Trainable parameters are placed first and balanced among themselves; frozen ones then even out the totals.
Nothing that was placed ever moves: ``extend`` only adds buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heapreplace

from shardstep.layout import Bucket, Layout, ParamSpec

# A cut, and the start of a parameter in its bucket, fall on multiples of this many elements where that costs
# at most 1/_SLACK of the balance. Then vector kernels meet the same lanes and tails as on the whole
# parameter, which is what makes their results bit-equal, and loads stay aligned.
ALIGNMENT = 64
_SLACK = 256


def extend(layout: Layout, specs: Sequence[ParamSpec], bucket_bytes: int) -> Layout:
    """``layout`` with further parameters. What was placed stays where it is."""
    loads = _Loads.of(layout)
    buckets = list(layout.buckets)
    for trainable in (True, False):
        chosen = [spec for spec in specs if spec.trainable == trainable]
        whole = [spec for spec in chosen if spec.granularity == "tensor" or spec.numel == 0]
        owners = _assign_greedily(whole, loads, layout.world_size, trainable)
        for run in _fill_buckets(whole, bucket_bytes):
            buckets.append(_whole_bucket(len(buckets), run, owners))
        cuttable = [spec for spec in chosen if spec.granularity != "tensor" and spec.numel > 0]
        for run in _fill_buckets(cuttable, bucket_bytes):
            bucket = _cut_bucket(len(buckets), run, layout.world_size, loads.of_kind(trainable))
            loads.add_cut(bucket, trainable)
            buckets.append(bucket)
    return Layout(layout.world_size, layout.specs + tuple(specs), tuple(buckets))


def partition(specs: Sequence[ParamSpec], world_size: int, bucket_bytes: int) -> Layout:
    """The layout of ``specs`` over ``world_size`` ranks."""
    return extend(Layout(world_size), specs, bucket_bytes)


class _Loads:
    """Elements per rank, trainable and in total, while a layout is being made.

    Up to a constant: only differences between ranks matter, so what every rank gets is not counted.
    """

    def __init__(self, world_size: int) -> None:
        self.trainable = [0] * world_size
        self.total = [0] * world_size

    @classmethod
    def of(cls, layout: Layout) -> _Loads:
        loads = cls(layout.world_size)
        for bucket in layout.buckets:
            trainable = layout.spec_of[bucket.params[0]].trainable
            if bucket.owners is not None:
                for rank, numel in zip(bucket.owners, bucket.numels, strict=True):
                    loads.add(rank, numel, trainable)
            else:
                loads.add_cut(bucket, trainable)
        return loads

    def of_kind(self, trainable: bool) -> list[int]:
        return self.trainable if trainable else self.total

    def add(self, rank: int, numel: int, trainable: bool) -> None:
        self.total[rank] += numel
        if trainable:
            self.trainable[rank] += numel

    def add_cut(self, bucket: Bucket, trainable: bool) -> None:
        even = bucket.equal_shard or 0  # every rank before the end of the bucket gets this many
        first_uneven = bucket.numel // even if even else 0
        for rank in range(first_uneven, len(self.total)):
            start, stop = bucket.shard_range(rank)
            self.add(rank, stop - start - even, trainable)


def _assign_greedily(specs: Sequence[ParamSpec], loads: _Loads, world_size: int, trainable: bool) -> dict[int, int]:
    """Parameter index -> owner. Group by group, the largest first, to the rank that holds least.

    Ties go to the rank with the smaller total, then to the lower rank.
    """
    heap = [
        (loads.trainable[rank] if trainable else loads.total[rank], loads.total[rank], rank)
        for rank in range(world_size)
    ]
    heapify(heap)
    owners: dict[int, int] = {}
    for spec in sorted(specs, key=lambda spec: (spec.group, -spec.numel)):
        load, total, rank = heap[0]
        heapreplace(heap, (load + spec.numel, total + spec.numel, rank))
        loads.add(rank, spec.numel, trainable)
        owners[spec.index] = rank
    return owners


def _fill_buckets(specs: Sequence[ParamSpec], bucket_bytes: int) -> Iterable[list[ParamSpec]]:
    """Runs of parameters of one device and dtype of at most ``bucket_bytes``, last parameter first.

    That is the order in which backward finishes gradients. A parameter larger than a bucket is a run of
    its own and does not close the run that smaller ones are filling.
    """
    runs: list[list[ParamSpec]] = []
    open_runs: dict[tuple[str, str], tuple[list[ParamSpec], int]] = {}
    for spec in reversed(specs):
        nbytes = spec.numel * spec.itemsize
        if nbytes >= bucket_bytes:
            runs.append([spec])
            continue
        run, filled = open_runs.get((spec.device, spec.dtype), (None, 0))
        if run is None or filled + nbytes > bucket_bytes:
            run, filled = [], 0
            runs.append(run)
        run.append(spec)
        open_runs[spec.device, spec.dtype] = run, filled + nbytes
    return runs


def _whole_bucket(position: int, run: Sequence[ParamSpec], owners: dict[int, int]) -> Bucket:
    """A bucket whose shards are whole parameters: laid out owner by owner, so that a shard is one range."""
    ordered = sorted(run, key=lambda spec: owners[spec.index])
    offsets, numel = _lay_out(ordered)
    return _bucket(position, ordered, offsets, numel, owners=tuple(owners[spec.index] for spec in ordered))


def _cut_bucket(position: int, run: Sequence[ParamSpec], world_size: int, loads: Sequence[int]) -> Bucket:
    """A bucket cut into equal shards.

    One that is too small for equal aligned shards evens out instead what the earlier ones left uneven.
    """
    offsets, numel = _lay_out(run)
    granule = _alignment(numel // world_size)
    if numel >= _SLACK * world_size:
        shard = -(-numel // world_size)
        shard = -(-shard // granule) * granule
        cuts: Sequence[int] = range(0, shard * world_size + 1, shard)
    else:
        cuts = _level(loads, numel)
    return _bucket(position, run, offsets, numel, cuts=cuts)


def _bucket(
    position: int,
    run: Sequence[ParamSpec],
    offsets: Sequence[int],
    numel: int,
    owners: tuple[int, ...] | None = None,
    cuts: Sequence[int] | None = None,
) -> Bucket:
    indices, numels = tuple([spec.index for spec in run]), tuple([spec.numel for spec in run])
    first = run[0]
    return Bucket(
        position, first.device, first.dtype, first.itemsize, indices, tuple(offsets), numels, numel, owners, cuts
    )


def _lay_out(run: Sequence[ParamSpec]) -> tuple[list[int], int]:
    """Where each parameter starts, and where the last one ends."""
    offsets, end = [], 0
    for spec in run:
        align = _alignment(spec.numel)
        start = -(-end // align) * align
        offsets.append(start)
        end = start + spec.numel
    return offsets, end


def _alignment(numel: int) -> int:
    """The largest power of two up to ALIGNMENT that is at most numel / _SLACK."""
    if numel >= ALIGNMENT * _SLACK:
        return ALIGNMENT
    return 1 << max(numel // _SLACK, 1).bit_length() - 1


def _level(loads: Sequence[int], numel: int) -> tuple[int, ...]:
    """Bounds that give ``numel`` elements to the ranks that hold least, until all hold the same."""
    ranks = sorted(range(len(loads)), key=lambda rank: (loads[rank], rank))
    filled, level_sum = 0, 0
    # How many of the emptiest ranks take part: raise the level until the elements are used up.
    while filled < len(ranks) and loads[ranks[filled]] * filled - level_sum <= numel:
        level_sum += loads[ranks[filled]]
        filled += 1
    level, extra = divmod(level_sum + numel, filled)
    shares = [0] * len(loads)
    for position, rank in enumerate(ranks[:filled]):
        shares[rank] = level - loads[rank] + (1 if position < extra else 0)
    bounds = [0]
    for share in shares:
        bounds.append(bounds[-1] + share)
    return tuple(bounds)

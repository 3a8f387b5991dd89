"""From parameter specs to a layout. Pure functions: the same input gives the same layout on every rank.

"tensor" keeps parameters whole: the largest first, each to the rank that holds least so far.
"element" lays parameters into buckets and cuts each bucket into equal shards, wherever the cut falls.

Trainable parameters are placed first and balanced among themselves; frozen ones then even out the totals.
Nothing that was placed ever moves: ``extend`` only adds buckets.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise

from shardstep.layout.specs import Bucket, Layout, ParamSpec

# Every parameter in a bucket starts on such a boundary, as torch's own allocations do: kernels choose their path by the
# alignment of their operands, and another path may round differently.
ALIGNED_BYTES = 64
# A cut, and the start of a large parameter, fall on multiples of this many elements where that costs at most 1/_SLACK
# of the balance. Then vector kernels meet the same lanes and tails in a piece as in the whole parameter, which is what
# makes their results bit-equal.
ALIGNMENT = 64
_SLACK = 256


def extend(layout: Layout, specs: Sequence[ParamSpec], bucket_bytes: int, reduce_itemsize: int | None = None) -> Layout:
    """``layout`` with further parameters. What was placed stays where it is.

    ``reduce_itemsize``: of the dtype in which gradients lie in the same places, if it is another.
    """
    narrowest = reduce_itemsize or ALIGNED_BYTES
    loads = _Loads.of(layout)
    buckets = list(layout.buckets)
    for trainable in (True, False):
        chosen = [spec for spec in specs if spec.trainable == trainable]
        whole = [spec for spec in chosen if spec.granularity == "tensor" or spec.numel == 0]
        owners = _assign_greedily(whole, loads, layout.world_size, trainable)
        for run in _fill_buckets(whole, bucket_bytes, narrowest):
            buckets.append(_whole_bucket(len(buckets), run, owners, narrowest))
        cuttable = [spec for spec in chosen if spec.granularity != "tensor" and spec.numel > 0]
        for run in _fill_buckets(cuttable, bucket_bytes, narrowest):
            bucket = _cut_bucket(len(buckets), run, layout.world_size, loads.of_kind(trainable), narrowest)
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
        even = bucket.equal_shard  # every rank before the end of the bucket gets this many; padding there is negligible
        if even is None:
            for rank, (before, after) in enumerate(pairwise(_elements_before(bucket))):
                self.add(rank, after - before, trainable)
            return
        for rank in range(bucket.numel // even, len(self.total)):
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


def _fill_buckets(specs: Sequence[ParamSpec], bucket_bytes: int, narrowest: int) -> Iterable[list[ParamSpec]]:
    """Runs of parameters of one device, dtype and kind of master, of at most ``bucket_bytes``, last parameter first.

    (Padding is included. Within its bucket a run is put into another order, which may need a little more padding.)
    That is the order in which backward finishes gradients. A parameter larger than a bucket is a run of
    its own and does not close the run that smaller ones are filling.
    """
    runs: list[list[ParamSpec]] = []
    open_runs: dict[tuple[str, str, str], tuple[list[ParamSpec], int]] = {}
    for spec in reversed(specs):
        if spec.numel * spec.itemsize >= bucket_bytes:
            runs.append([spec])
            continue
        kind = spec.device, spec.dtype, spec.master
        run, end = open_runs.get(kind, (None, 0))
        end = _start_after(end, spec, narrowest) + spec.numel
        if run is None or end * spec.itemsize > bucket_bytes:
            run, end = [], spec.numel
            runs.append(run)
        run.append(spec)
        open_runs[kind] = run, end
    return runs


def _whole_bucket(position: int, run: Sequence[ParamSpec], owners: dict[int, int], narrowest: int) -> Bucket:
    """A bucket whose shards are whole parameters: laid out owner by owner, so that a shard is one range."""
    ordered = sorted(run, key=lambda spec: owners[spec.index])
    offsets, numel = _lay_out(ordered, narrowest)
    return _bucket(position, ordered, offsets, numel, owners=tuple(owners[spec.index] for spec in ordered))


def _cut_bucket(
    position: int, run: Sequence[ParamSpec], world_size: int, loads: Sequence[int], narrowest: int
) -> Bucket:
    """A bucket cut into equal shards, the first parameter first: rank 0 owns it.

    One that is too small for equal aligned shards, or has much padding because its parameters are tiny, gives out
    elements instead: it evens out what the earlier ones left uneven.
    """
    run = run[::-1]
    offsets, numel = _lay_out(run, narrowest)
    elements = sum(spec.numel for spec in run)
    granule = _alignment(elements // world_size)
    if elements >= _SLACK * world_size and (numel - elements) * _SLACK <= elements:
        shard = -(-numel // world_size)
        shard = -(-shard // granule) * granule
        cuts: Sequence[int] = range(0, shard * world_size + 1, shard)
    else:
        cuts = _positions(_level(loads, elements), run, offsets, granule)
    return _bucket(position, run, offsets, numel, cuts=cuts)


def _positions(
    bounds: Sequence[int], run: Sequence[ParamSpec], offsets: Sequence[int], granule: int
) -> tuple[int, ...]:
    """Where in the buffer the ``bounds``, counted in elements, lie.

    Within a parameter that is on a multiple of ``granule`` from its start; behind the last one it is the end.
    """
    before = list(accumulate((spec.numel for spec in run), initial=0))
    positions = []
    for bound in bounds:
        i = min(bisect_right(before, bound) - 1, len(run) - 1)
        inside = bound - before[i]
        positions.append(offsets[i] + (inside if inside == run[i].numel else inside // granule * granule))
    return tuple(positions)


def _elements_before(bucket: Bucket) -> list[int]:
    """How many elements, padding not counted, lie before each cut."""
    before = list(accumulate(bucket.numels, initial=0))
    found = []
    for cut in bucket.cuts or ():
        i = bisect_right(bucket.offsets, cut) - 1
        found.append(before[i] + min(cut - bucket.offsets[i], bucket.numels[i]))
    return found


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


def _lay_out(run: Sequence[ParamSpec], narrowest: int) -> tuple[list[int], int]:
    """Where each parameter starts, and where the last one ends."""
    offsets, end = [], 0
    for spec in run:
        start = _start_after(end, spec, narrowest)
        offsets.append(start)
        end = start + spec.numel
    return offsets, end


def _start_after(end: int, spec: ParamSpec, narrowest: int) -> int:
    """Where a parameter starts if the one before ends at ``end``: on a boundary of bytes, and of elements if large."""
    align = max(ALIGNED_BYTES // min(spec.itemsize, narrowest), _alignment(spec.numel))
    return -(-end // align) * align


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

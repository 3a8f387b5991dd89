"""The parts in which a bucket travels: together they are the bucket, each has something for every rank."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from shardstep.comm.topology import Topology
from shardstep.grads.bucket_part import parts_of
from shardstep.grads.reduce_scatter import regions_in, slot_bytes
from shardstep.layout import partition
from shardstep.layout.bucket_size import chosen_bucket_bytes
from shardstep.layout.specs import Bucket, Layout, ParamSpec
from tests.unit.specs import specs_of_sizes

MIB = 2**20


def bucket_of(numel: int, world_size: int, granularity: str) -> Bucket:
    spec = ParamSpec(0, (numel,), numel, "float32", 4, "cpu#0", granularity=granularity)
    (bucket,) = partition.extend(Layout(world_size), [spec], 64).buckets
    return bucket


@pytest.mark.parametrize("granularity", ["element", "tensor"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("numel", [1, 17, 1000, 4097])
def test_parts_have_every_element_once_and_go_to_its_owner(numel, world_size, granularity):
    bucket = bucket_of(numel, world_size, granularity)
    gradient = torch.arange(numel, dtype=torch.float32) + 1
    for most_bytes in (64, 400, 10**6):
        got = [torch.zeros(bucket.numel) for _ in range(world_size)]
        for part in parts_of(bucket, world_size, most_bytes, torch.float32):
            assert part.nbytes <= most_bytes + 4 * world_size or len(bucket.params) > 1
            packed = part.pack([gradient], torch.full((part.numel,), -1.0))
            for rank in range(world_size):
                got[rank][slice(*part.ranges[rank])] += packed[slice(*part.spans[rank])]
        for rank in range(world_size):
            low, high = bucket.shard_range(rank)
            expected = torch.zeros(bucket.numel)
            expected[low : min(high, numel)] = gradient[low:high]
            assert torch.equal(got[rank], expected), (most_bytes, rank)


def test_a_rank_without_a_gradient_sends_zeros():
    bucket = bucket_of(1000, 3, "element")
    for part in parts_of(bucket, 3, 400, torch.float64):
        assert not part.pack([None], torch.full((part.numel,), -1.0, dtype=torch.float64)).any()


@pytest.mark.parametrize(
    ("total", "on_cpu", "expected"),
    [
        (0, True, MIB),
        (10 * MIB, True, MIB),
        (54 * MIB, True, 54 * MIB // 12),
        (1000 * MIB, True, 12 * MIB),
        (28_000 * MIB, True, 12 * MIB),
        (28_000 * MIB, False, 25 * MIB),
    ],
)
def test_the_size_of_a_bucket_follows_the_model(total, on_cpu, expected):
    assert chosen_bucket_bytes(total, on_cpu) == expected


def test_ranks_that_write_different_parts_into_one_slot_do_not_write_over_each_other():
    """As happens after an iteration that was aborted: what a rank finds in its region it sends again."""
    world = 3
    for granularity in ("element", "tensor"):
        layout = partition.extend(Layout(world), specs_of_sizes((700, 5, 90, 33, 400), granularity), 800)
        parts = [part for bucket in layout.buckets for part in parts_of(bucket, world, 800, torch.float32)]
        assert len(parts) > 3
        slot = torch.empty(slot_bytes(parts, [range(world)]), dtype=torch.uint8)
        seen: list[set[int]] = [set() for _ in range(world)]  # bytes of the slot, by the rank that writes them
        for part in parts:
            for rank in range(world):
                region = regions_in(slot, part, Topology(rank, (tuple(range(world)),))).mine
                start = region.data_ptr() - slot.data_ptr() if region.numel() else 0
                seen[rank].update(range(start, start + region.nbytes))
        assert not any(one & other for one, other in combinations(seen, 2)), granularity

"""Parameter specs to lay out, and the partition that torch makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from shardstep.layout.specs import Layout, ParamSpec

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float64": 8}
DEVICES = ("cpu#0", "cuda#0", "cuda#1")
DEFAULT_CAP = 25 * 2**20


def spec(index: int, numel: int, granularity: str = "element", **fields) -> ParamSpec:
    """A 1D float32 parameter on the CPU, unless told otherwise."""
    dtype = fields.pop("dtype", "float32")
    return ParamSpec(
        index=index,
        shape=(numel,),
        numel=numel,
        dtype=dtype,
        itemsize=ITEMSIZES[dtype],
        device=fields.pop("device", "cpu#0"),
        granularity=granularity,
        **fields,
    )


def specs_of_sizes(sizes: Iterable[int], granularity: str = "element", **fields) -> list[ParamSpec]:
    return [spec(index, numel, granularity, **fields) for index, numel in enumerate(sizes)]


# Empty, tiny, around the sizes at which alignments change, and larger than any bucket cap below.
numels = st.one_of(
    st.just(0), st.integers(1, 10), st.integers(250, 1100), st.integers(16_000, 17_000), st.integers(1, 3_000_000)
)
world_sizes = st.integers(1, 64)
caps = st.sampled_from([1, 64, 4096, 2**16, 2**20, DEFAULT_CAP])


def spec_lists(
    granularities: Sequence[str] = ("element", "tensor"), trainable: Sequence[bool] = (True, False), max_size: int = 24
) -> st.SearchStrategy[list[ParamSpec]]:
    """Specs of several groups, as an optimizer makes them: indices ascend (with gaps: tied weights), so do groups."""
    row = st.tuples(
        numels,
        st.sampled_from(granularities),
        st.sampled_from(sorted(ITEMSIZES)),
        st.sampled_from(DEVICES),
        st.sampled_from(trainable),
        st.sampled_from([1, 1, 1, 2]),  # how far the index moves on
        st.sampled_from([0, 0, 0, 1]),  # and the group
    )
    return st.lists(row, max_size=max_size).map(_number)


def _number(rows: Sequence[tuple]) -> list[ParamSpec]:
    specs, index, group = [], -1, 0
    for numel, granularity, dtype, device, trainable, further, opens_group in rows:
        index, group = index + further, group + opens_group
        specs.append(spec(index, numel, granularity, dtype=dtype, device=device, trainable=trainable, group=group))
    return specs


def greedy_owners(specs: Sequence[ParamSpec], world_size: int) -> dict[int, int]:
    """torch's partition (compat.md, section 4): group by group, the largest first, to the rank with the least."""
    loads = [0] * world_size
    owners = {}
    for group in sorted({spec.group for spec in specs}):
        members = [spec for spec in specs if spec.group == group]
        for member in sorted(members, key=lambda spec: spec.numel, reverse=True):
            rank = loads.index(min(loads))
            loads[rank] += member.numel
            owners[member.index] = rank
    return owners


def owners_of(layout: Layout, indices: Iterable[int]) -> dict[int, int]:
    """Who owns each of these whole parameters."""
    wanted = set(indices)
    return {p.param: rank for rank in range(layout.world_size) for p in layout.pieces(rank) if p.param in wanted}


def loads_of(layout: Layout, trainable_only: bool = False) -> list[int]:
    return [layout.owned_elements(rank, trainable_only) for rank in range(layout.world_size)]

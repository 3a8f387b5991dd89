"""Parameter specs to lay out, and the partition that torch makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from shardstep.layout import Layout, ParamSpec

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


@st.composite
def spec_lists(draw, granularities: Sequence[str] = ("element", "tensor"), trainable=st.booleans(), max_size=30):
    """Specs of several groups, as an optimizer makes them: indices ascend (with gaps: tied weights), so do groups."""
    specs, index, group = [], 0, 0
    for _ in range(draw(st.integers(0, max_size))):
        index += draw(st.sampled_from([1, 1, 1, 2]))
        group += draw(st.sampled_from([0, 0, 0, 1]))
        specs.append(
            spec(
                index,
                draw(numels),
                draw(st.sampled_from(granularities)),
                dtype=draw(st.sampled_from(sorted(ITEMSIZES))),
                device=draw(st.sampled_from(DEVICES)),
                trainable=draw(trainable),
                group=group,
            )
        )
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

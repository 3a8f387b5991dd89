"""Masters in blocks: every element is in one block, beside its parameter's, wherever that lies."""

from __future__ import annotations

import pytest
import torch

from shardstep.params import master_blocks
from shardstep.params.master_blocks import Blocks, Place, block_size, copied_numel, flat_memory, runs_of

CPU = torch.device("cpu")
BLOCK = 256


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(master_blocks, "_ON_CPU", BLOCK)


def _places(shapes):
    """Parameters of these shapes with numbers of their own, at places with gaps between them."""
    places, start = [], 32
    for number, shape in enumerate(shapes):
        count = torch.Size(shape).numel()
        memory = (torch.arange(count) % 100 + 1000 * (number + 1)).to(torch.float16).view(shape)
        places.append(Place(start, start + count, memory))
        start += -(-count // 32) * 32
    return places, start


def _blocks(places, numel):
    runs = runs_of(places, CPU)
    narrow = torch.full((copied_numel(runs),), -1.0, dtype=torch.float16)
    values = torch.arange(numel, dtype=torch.float32)
    return Blocks(runs, values, None, narrow, torch.empty(BLOCK, dtype=torch.int32)), runs


SHAPES = [
    [(1,)],
    [(7,), (5, 3), (0,), (40,)],
    [(300,), (5,), (129,), (128,), (127,), (3, 400)],
    [(1000,), (1, 255), (2,), (256,), (257,)],
]


@pytest.mark.parametrize("shapes", SHAPES)
def test_every_element_is_in_one_block_beside_its_parameter(shapes):
    places, numel = _places(shapes)
    blocks, _ = _blocks(places, numel)
    blocks.read()
    narrow, seen = torch.zeros(numel, dtype=torch.float16), torch.zeros(numel, dtype=torch.int64)
    for block in blocks:
        assert 0 < block.values.numel() == block.narrow.numel() == block.scratch.numel() <= block_size(CPU)
        assert torch.equal(block.values, torch.arange(block.where.start, block.where.stop, dtype=torch.float32))
        narrow[block.where] = block.narrow
        seen[block.where] += 1
    assert seen.max() <= 1
    for start, stop, memory in places:
        assert torch.equal(narrow[start:stop], memory.reshape(-1))
        assert (seen[start:stop] == 1).all()
    inside = torch.cat([torch.arange(start, stop) for start, stop, _ in places])
    between = torch.ones(numel, dtype=torch.bool).index_fill_(0, inside, False)
    assert (narrow[between] == 0).all()  # whatever was in the memory for copies before


@pytest.mark.parametrize("shapes", SHAPES)
def test_what_is_written_into_blocks_is_in_the_parameters(shapes):
    places, numel = _places(shapes)
    blocks, _ = _blocks(places, numel)
    blocks.read()
    expected = [memory * 2 for _, _, memory in places]
    for block in blocks:
        block.narrow.mul_(2)
    blocks.write()
    assert all(torch.equal(memory, twice) for (_, _, memory), twice in zip(places, expected, strict=True))


def test_a_parameter_of_half_a_block_or_more_is_worked_on_where_it_lies():
    places, _ = _places([(300,), (5,), (6,), (128,), (127,)])
    runs = runs_of(places, CPU)
    assert [len(run.places) for run in runs] == [1, 2, 1, 1]
    assert [run.memory is None for run in runs] == [False, True, False, True]
    assert runs[0].memory.data_ptr() == places[0].memory.data_ptr()


def test_a_parameter_in_another_order_of_memory_keeps_it_and_one_with_gaps_is_copied():
    turned = torch.arange(600).view(20, 30).t()
    assert torch.equal(flat_memory(turned), torch.arange(600))
    assert flat_memory(turned).data_ptr() == turned.data_ptr()
    gaps = torch.arange(1200).view(600, 2)[:, 0]
    assert flat_memory(gaps) is None
    (run,) = runs_of([Place(0, 600, gaps)], CPU)
    assert run.memory is None
    blocks = Blocks([run], torch.zeros(600), None, torch.zeros(copied_numel([run]), dtype=torch.int64), None)
    blocks.read()
    assert torch.equal(torch.cat([block.narrow for block in blocks]), gaps)
    for block in blocks:
        block.narrow.neg_()
    blocks.write()
    assert torch.equal(gaps, -2 * torch.arange(600))

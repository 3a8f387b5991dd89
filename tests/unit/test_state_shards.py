"""A piece of a state crosses to another process, and nowhere else."""

from __future__ import annotations

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from shardstep.state.shard import StateShard, shard_of_range


def shard() -> StateShard:
    """Elements 3 to 17 of a matrix of 5 x 4, which are three boxes."""
    return shard_of_range((5, 4), 3, 17, torch.arange(3.0, 17.0), blank=False)


def test_a_file_of_torch_save_or_pickle_would_look_like_the_whole_so_both_are_refused():
    for write in (pickle.dumps, copy.copy, lambda value: torch.save(value, io.BytesIO())):
        with pytest.raises(RuntimeError, match=r"shardstep\.checkpoint"):
            write(shard())


def test_the_pickler_of_multiprocessing_carries_it_with_its_boxes():
    before = shard()
    after = ForkingPickler.loads(ForkingPickler.dumps(before))
    assert isinstance(after, StateShard)
    assert (after.shape, after.dtype, after.writes, after.blank) == (before.shape, before.dtype, True, False)
    assert torch.equal(after.local, before.local)
    assert len(after.parts) == 3
    for one, other in zip(after.parts, before.parts, strict=True):
        assert one.box == other.box
        assert torch.equal(one.tensor, other.tensor)

"""Several ranks that save plain optimizers of their own: nobody's checkpoint is lost without a word."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.harness import run_ranks
from tests.oracle import assert_same, error_of, parameters, train


def plain(mark: int = 0) -> torch.optim.Optimizer:
    params = parameters()
    optimizer = torch.optim.AdamW(params, lr=0.1)
    train(optimizer, params, range(2))
    for param in params:
        optimizer.state[param]["exp_avg"].fill_(mark)
    return optimizer


def save_together(rank: int, world: int, folder: Path) -> str:
    """One of them through another name of the same directory."""
    try:
        checkpoint.save(folder / ("link" if rank == 1 else "real") / "plain", plain(rank))
    except RuntimeError as error:
        return str(error)
    return ""


def test_of_a_plain_optimizer_on_many_ranks_one_copy_is_saved_and_the_others_are_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for _ in range(2):  # in another run another rank may save there
        told = run_ranks(save_together, 3, tmp_path)
        (saved,) = (rank for rank, text in enumerate(told) if not text)
        assert all(f"rank {saved} of this run" in text for text in told if text)
        assert os.listdir(tmp_path / "real") == ["plain"], "nothing else is left"
        fresh = torch.optim.AdamW(parameters())
        checkpoint.load(tmp_path / "real" / "plain", fresh)
        assert all((state["exp_avg"] == saved).all() for state in fresh.state.values())


def save_beside(rank: int, world: int, folder: Path) -> None:
    params = parameters()
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.1)
    train(optimizer, params, range(2))
    checkpoint.save(folder / "x", optimizer)
    part = ZeroRedundancyOptimizer(params, torch.optim.AdamW, [dist.new_group([0]), dist.new_group([1, 2])][rank > 0])
    if rank == 1:
        assert "rank 0 of this run has saved" in str(error_of(lambda: checkpoint.save(folder / "x", plain())))
    if rank > 0:
        assert "has saved" in str(error_of(lambda: checkpoint.save(folder / "x", part)))
        error_of(lambda: checkpoint.save(folder / str(rank), plain(), extra={"f": open}), "no plain data")
    dist.barrier()
    for step in range(3):
        checkpoint.save(folder / "own" / f"{step}-of-{rank}", plain(), keep=1)
    checkpoint.save(folder / str(3 - rank if rank else 0), plain())  # what failed leaves the directory to others
    fresh = torch.optim.AdamW(parameters())
    checkpoint.load(folder / "x", fresh)
    optimizer.consolidate_state_dict()
    if rank == 0:
        assert_same(optimizer.state_dict()["state"], fresh.state_dict()["state"], "what the group saved is there")


def test_what_other_ranks_or_groups_have_saved_is_neither_replaced_nor_pruned(tmp_path):
    run_ranks(save_beside, 3, tmp_path)
    assert sorted(os.listdir(tmp_path / "own")) == [f"2-of-{rank}" for rank in range(3)]

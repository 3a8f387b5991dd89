"""Checkpoints of several hosts: on a disk that they share, and on disks that they do not share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from shardstep import checkpoint
from tests.hosts.launch import run_on_hosts
from tests.hosts.namespaces import PREFIX
from tests.hosts.training import MODES, STEPS, Training, make_model, plain, train
from tests.oracle import assert_same, error_of

OWN = Path("/tmp/checkpoints")  # every host has a /tmp of its own
FIRST, SECOND = Path("/tmp/first"), Path("/tmp/second")  # only on the first host, only on the second


# --- on every rank ----------------------------------------------------------------------------------------------------


def make() -> Training:
    return MODES["shard_gradients"](make_model())


def save_and_load(folder: Path) -> dict[str, Any]:
    """Where all hosts see it, and where only one does: the weights, and what it was told."""
    trained, loaded = make(), make()
    weights = train(trained)
    checkpoint.save(folder / "saved", trained.optimizer, trained.model, {"step": STEPS})
    checkpoint.load(folder / "saved", loaded.optimizer, loaded.model)
    told: dict[str, Any] = {"weights": weights, "went on": train(trained), "loaded and went on": train(loaded)}
    told["save"] = str(error_of(lambda: checkpoint.save(OWN / "step", trained.optimizer, trained.model)))
    dist.barrier()  # the other rank of this host may still be cleaning up
    told["left"] = sorted(path.name for path in OWN.iterdir()) if OWN.exists() else []
    copy_on_one_host(folder / "saved")
    for parent in (FIRST, SECOND):
        told[f"load, {parent.name}"] = told_by(checkpoint.load, parent / "saved")
        told[f"resume, {parent.name}"] = told_by(checkpoint.resume, parent)
    return told


def told_by(read: Callable[..., Any], where: Path) -> str:
    training = make()
    return str(error_of(lambda: read(where, training.optimizer, training.model)))


def copy_on_one_host(saved: Path) -> None:
    """The checkpoint, to a place that only the first host has, and to one that only the second has."""
    host = dist.get_rank() // int(os.environ["LOCAL_WORLD_SIZE"])
    if os.environ["LOCAL_RANK"] == "0":
        shutil.copytree(saved, (FIRST, SECOND)[host] / "saved")
    dist.barrier()


# --- what came out ----------------------------------------------------------------------------------------------------


class Told(NamedTuple):
    folder: Path  # that the hosts shared
    by_rank: list[dict[str, Any]]


@pytest.fixture(scope="module")
def told(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """One job of 2+2 ranks that saves and loads in all these places."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return Told(folder, run_on_hosts(save_and_load, [[0, 1], [2, 3]], folder))


def test_a_job_on_two_hosts_goes_on_from_a_shared_directory_with_the_same_bits(told: Told) -> None:
    for rank in told.by_rank:
        assert_same(rank["loaded and went on"], rank["went on"])


def test_one_process_on_one_host_loads_what_two_hosts_have_saved(told: Told) -> None:
    model, _, optimizer = plain(make_model())
    assert checkpoint.load(told.folder / "saved", optimizer, model) == {"step": STEPS}
    assert_same([param.detach() for param in model.parameters()], told.by_rank[0]["weights"])
    assert {int(state["step"]) for state in optimizer.state.values()} == {STEPS}


def test_saving_where_each_host_has_its_own_disk_is_an_error_on_every_rank_and_leaves_nothing(told: Told) -> None:
    for rank in told.by_rank:
        assert "checkpoint.save expects a directory that all ranks see" in rank["save"]
        assert f"on the host {PREFIX}0, does not see what others have written (rank 2, 3)" in rank["save"]
        assert rank["left"] == []


def test_a_checkpoint_that_only_one_host_sees_is_an_error_on_every_rank_and_no_fresh_start(told: Told) -> None:
    for rank in told.by_rank:
        for call in ("load", "resume"):
            assert "expects a directory that all ranks see" in rank[f"{call}, first"]
            assert f"/tmp/first/saved does not exist on the host {PREFIX}1" in rank[f"{call}, first"]
        assert f"/tmp/second/saved does not exist on the host {PREFIX}0" in rank["load, second"]
        assert "checkpoints is none on ranks 0, 1 but some on ranks 2, 3" in rank["resume, second"]

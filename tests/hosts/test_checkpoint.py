"""Checkpoints of several hosts: on a disk that they share, and on disks that they do not share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.optim import AdamW

from shardstep import checkpoint
from tests.hosts import checkpoint_worker
from tests.hosts.launch import torchrun
from tests.hosts.namespaces import PREFIX, open_hosts
from tests.hosts.training import STEPS, make_model
from tests.oracle import assert_same


class Told(NamedTuple):
    folder: Path  # that the hosts shared
    by_rank: list[dict[str, Any]]


@pytest.fixture(scope="module")
def told(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """One job of 2+2 ranks that saves and loads in all these places."""
    folder = tmp_path_factory.mktemp("checkpoint")
    command = [Path(checkpoint_worker.__file__), folder]
    with open_hosts(2, folder) as hosts, torchrun(hosts, [2, 2], command, folder) as job:
        job.succeed(150)
    return Told(folder, [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(4)])


def test_a_job_on_two_hosts_goes_on_from_a_shared_directory_with_the_same_bits(told: Told) -> None:
    for rank in told.by_rank:
        assert_same(rank["loaded and went on"], rank["went on"])


def test_one_process_on_one_host_loads_what_two_hosts_have_saved(told: Told) -> None:
    model = make_model()
    plain = AdamW(model.parameters(), lr=1e-2)
    assert checkpoint.load(told.folder / "saved", plain, model) == {"step": STEPS}
    assert_same([param.detach() for param in model.parameters()], told.by_rank[0]["weights"])
    assert {int(state["step"]) for state in plain.state.values()} == {STEPS}


def test_saving_where_each_host_has_its_own_disk_is_an_error_on_every_rank_that_says_so(told: Told) -> None:
    for rank in told.by_rank:
        assert "checkpoint.save expects a directory that all ranks see" in rank["save"]
        assert f"on the host {PREFIX}0, does not see what others have written (rank 2, 3)" in rank["save"]


def test_a_save_that_failed_so_leaves_nothing_on_any_host(told: Told) -> None:
    assert [rank["left"] for rank in told.by_rank] == [[], [], [], []]


@pytest.mark.parametrize("call", ["load", "resume"])
def test_a_checkpoint_that_only_the_first_host_sees_is_an_error_on_every_rank_that_says_so(
    told: Told, call: str
) -> None:
    for rank in told.by_rank:
        assert "expects a directory that all ranks see" in rank[f"{call}, first"]
        assert f"/tmp/first/saved does not exist on the host {PREFIX}1" in rank[f"{call}, first"]


def test_loading_what_only_the_second_host_sees_is_an_error_on_every_rank_that_says_so(told: Told) -> None:
    for rank in told.by_rank:
        assert f"/tmp/second/saved does not exist on the host {PREFIX}0" in rank["load, second"]


def test_a_job_whose_first_host_sees_no_checkpoints_does_not_start_over_if_another_one_does(told: Told) -> None:
    for rank in told.by_rank:
        assert "checkpoints is none on ranks 0, 1 but some on ranks 2, 3" in rank["resume, second"]

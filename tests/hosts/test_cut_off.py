"""A host that is cut off in the middle of an iteration: the others say so in time, and torchrun heals the job."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.hosts import cut_worker
from tests.hosts.cut_worker import FATAL_STEP, STEPS, TIMEOUT
from tests.hosts.launch import Job, torchrun
from tests.hosts.namespaces import Host, open_hosts
from tests.hosts.training import MODES, Training, loss_of, make_model

RANKS = range(4)
# After the time-out the ranks look for each other for two seconds, up to twice. The rest is for a busy machine.
SLACK = 10.0
OPTIONS = ["--max-restarts", "2", "--monitor-interval", "0.1"]
RENDEZVOUS = ",last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5"


WHERE = {
    "default": "step: the parameters could not be gathered",
    "shard_gradients": "backward: the gradients could not be reduced",
}


class Story(NamedTuple):
    """What became of a job whose second host was cut off."""

    errors: dict[int, dict[str, Any]]  # by rank, of those that raised before the link was back
    failure: str  # if it did not come to a good end
    ended: list[dict[str, Any]]  # by rank


@pytest.fixture(scope="module")
def story(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Story]:
    """What became of the job in a mode. Each runs once."""

    @cache
    def of(mode: str) -> Story:
        folder = tmp_path_factory.mktemp("cut")
        command = [Path(cut_worker.__file__), folder, mode]
        with open_hosts(2, folder) as hosts, torchrun(hosts, [2, 2], command, folder, OPTIONS, RENDEZVOUS) as job:
            return tell(hosts, job, folder)

    return of


def tell(hosts: list[Host], job: Job, folder: Path) -> Story:
    assert appear([folder / f"paused{rank}" for rank in RANKS], 90), f"never got there\n{job.printed()}"
    hosts[1].link.cut()
    (folder / "cut").touch()
    appear([folder / f"error{rank}.json" for rank in RANKS], TIMEOUT + SLACK)
    found = {rank: folder / f"error{rank}.json" for rank in RANKS}
    errors = {rank: json.loads(path.read_text()) for rank, path in found.items() if path.exists()}
    hosts[1].link.restore()
    try:
        job.succeed(90)
    except AssertionError as error:
        return Story(errors, str(error), [])
    return Story(errors, "", [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in RANKS])


def appear(paths: list[Path], seconds: float) -> bool:
    """Wait for files, at most so long; whether they are there."""
    deadline = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("mode", MODES)
def test_the_others_raise_within_the_timeout_and_name_the_missing_ranks(
    story: Callable[[str], Story], mode: str
) -> None:
    """In the default mode in the middle of ``step``, else in the middle of backward."""
    errors = story(mode).errors
    expected = WHERE.get(mode, "could not be")
    for rank in (0, 1):
        assert rank in errors, f"rank {rank} did not raise within {TIMEOUT + SLACK} s"
        assert errors[rank]["seconds"] <= TIMEOUT + SLACK
        assert expected in errors[rank]["error"]
        assert "ranks 2, 3 did not come to it" in errors[rank]["error"]


@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_have_lost_the_host_of_the_store_raise_within_the_timeout_as_well(
    story: Callable[[str], Story], mode: str
) -> None:
    """They cannot ask anybody who is missing, but they know that something is."""
    errors = story(mode).errors
    assert set(RANKS) == set(errors)
    for rank in (2, 3):
        assert "on the host of its first rank, does not answer" in errors[rank]["error"]


@pytest.mark.parametrize("mode", MODES)
def test_torchrun_heals_the_job_from_the_checkpoint_when_the_link_is_back(
    story: Callable[[str], Story], mode: str
) -> None:
    """Weights as one process on the joined batch has them, float64: see test_training.py about the tolerance. (A step
    that was lost, or made twice, moves weights by 1e-3.)"""
    told = story(mode)
    assert not told.failure, told.failure
    expected = undisturbed()
    for ended in told.ended:
        assert ended["began"] == FATAL_STEP
        assert ended["restarts"] >= 1
        torch.testing.assert_close(ended["weights"], expected, rtol=0, atol=1e-10)


def undisturbed() -> list[torch.Tensor]:
    """One process; the mean of the ranks' losses."""
    model = make_model()
    plain = Training(model, model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(STEPS):
        plain.optimizer.zero_grad()
        torch.stack([loss_of(plain, rank, step) for rank in RANKS]).mean().backward()
        plain.optimizer.step()
    return [param.detach() for param in model.parameters()]

"""A host that is cut off in the middle of an iteration: the others say so in time, and torchrun heals the job."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from shardstep import checkpoint
from tests.hosts.launch import Job, Task, results_of, torchrun
from tests.hosts.namespaces import Host, open_hosts
from tests.hosts.training import MODES, SMALL_CAP, loss_of, make_model, plain

STEPS = 6
FATAL_STEP = 3
RANKS = range(4)
TIMEOUT = 15.0  # of the process group, seconds
PATIENCE = 60.0  # for the link to be cut
# After the time-out the ranks look for each other for two seconds, up to twice. The rest is for a busy machine.
SLACK = 10.0
OPTIONS = ["--max-restarts", "2", "--monitor-interval", "0.1"]
RENDEZVOUS = ",last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5"
WHERE = {
    "default": "step: the parameters could not be gathered",
    "shard_gradients": "backward: the gradients could not be reduced",
    "reduce_scatter_hook": "could not be",
}


def appear(paths: list[Path], seconds: float) -> bool:
    """Wait for files, at most so long; whether they are there."""
    deadline = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# --- on every rank ----------------------------------------------------------------------------------------------------


class Pause:
    """Where a rank stops once, when it is armed, until the test has cut the link."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.armed = False
        self.ended = 0.0  # when it went on

    def stop(self) -> None:
        if self.armed:
            self.armed = False
            (self._folder / f"paused{dist.get_rank()}").touch()
            appear([self._folder / "cut"], PATIENCE)
            self.ended = time.monotonic()


class PausingAdamW(AdamW):
    """Stops after it has updated a bucket, with others to come."""

    pause: Pause | None = None  # set when the optimizer has been built, and probed

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.pause is not None:
            self.pause.stop()
        return result


def stop_in_backward(model: nn.Module, pause: Pause) -> None:
    """Stop where the last layer's gradients are on their way, and the others' are still to come."""

    def watch(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        inputs[0].register_hook(lambda gradient: pause.stop())

    list(model.children())[-1].register_forward_pre_hook(watch)


def lose_a_host(folder: Path, mode: str) -> dict[str, Any]:
    """Save every step and resume by itself. In the first life of ``folder`` all ranks stop in the middle of one
    iteration, in ``step`` (default) or in backward, until the link has been cut, and leave there what they are told."""
    pause = Pause(folder)
    try:
        return train_to_the_end(folder, mode, pause)
    except Exception as error:
        told = {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - pause.ended}
        (folder / f"error{dist.get_rank()}.json").write_text(json.dumps(told))
        raise


def train_to_the_end(folder: Path, mode: str, pause: Pause) -> dict[str, Any]:
    """From wherever the newest checkpoint is."""
    rule = PausingAdamW if mode == "default" else AdamW
    made = MODES[mode](make_model(), rule=rule, bucket_cap_mb=SMALL_CAP)
    found = checkpoint.resume(folder / "checkpoints", made.optimizer, made.model)
    began = 0 if found is None else found[1]["step"]
    PausingAdamW.pause = pause
    if rule is AdamW:
        stop_in_backward(made.model, pause)
    for step in range(began, STEPS):
        pause.armed = step == FATAL_STEP and not (folder / "cut").exists()
        made.optimizer.zero_grad()
        loss_of(made, dist.get_rank(), step).backward()
        made.optimizer.step()
        checkpoint.save(folder / "checkpoints" / f"step{step + 1}", made.optimizer, made.model, {"step": step + 1})
    weights = [param.detach().clone() for param in made.model.parameters()]
    return {"began": began, "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]), "weights": weights}


# --- what came out ----------------------------------------------------------------------------------------------------


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
        command = Task(__name__, lose_a_host.__name__, [mode], TIMEOUT).command(folder)
        with open_hosts(2, folder) as hosts, torchrun(hosts, [2, 2], command, folder, OPTIONS, RENDEZVOUS) as job:
            return tell(hosts, job, folder)

    return of


def tell(hosts: list[Host], job: Job, folder: Path) -> Story:
    assert appear([folder / f"paused{rank}" for rank in RANKS], 90), f"never got there\n{job.printed()}"
    hosts[1].link.cut()
    (folder / "cut").touch()
    found = {rank: folder / f"error{rank}.json" for rank in RANKS}
    appear(list(found.values()), TIMEOUT + SLACK)
    errors = {rank: json.loads(path.read_text()) for rank, path in found.items() if path.exists()}
    hosts[1].link.restore()
    try:
        job.succeed(90)
    except AssertionError as error:
        return Story(errors, str(error), [])
    return Story(errors, "", results_of(folder, len(RANKS)))


@pytest.mark.parametrize("mode", MODES)
def test_all_ranks_raise_within_the_timeout_and_name_who_is_missing(story: Callable[[str], Story], mode: str) -> None:
    """In the default mode in the middle of ``step``, else in the middle of backward. Ranks that have lost the host of
    the store cannot ask anybody who is missing, but they know that something is."""
    errors = story(mode).errors
    assert set(errors) == set(RANKS), f"some did not raise within {TIMEOUT + SLACK} s"
    for rank in (0, 1):
        assert errors[rank]["seconds"] <= TIMEOUT + SLACK
        assert WHERE[mode] in errors[rank]["error"]
        assert "ranks 2, 3 did not come to it" in errors[rank]["error"]
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


def undisturbed() -> list[Tensor]:
    """One process; the mean of the ranks' losses."""
    alone = plain(make_model())
    for step in range(STEPS):
        alone.optimizer.zero_grad()
        torch.stack([loss_of(alone, rank, step) for rank in RANKS]).mean().backward()
        alone.optimizer.step()
    return [param.detach() for param in alone.model.parameters()]

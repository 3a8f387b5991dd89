"""The device of these tests: the simulated one, or with ``SHARDSTEP_ACCELERATOR=cuda`` (``make test-gpu``) a GPU.

A test that imports ``on_device`` from here runs on both. What only the simulation knows (races, what is late, the
trace, poisoned memory) is marked ``simulation_only``.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardstep
from tests import harness
from tests.accelerator import simulated

DEVICE = os.environ.get("SHARDSTEP_ACCELERATOR", "sim")
_COLLECTIVES = {"sim": "simccl", "cuda": "nccl"}
if DEVICE not in _COLLECTIVES:
    raise ValueError(f"SHARDSTEP_ACCELERATOR expects one of {', '.join(_COLLECTIVES)} but got {DEVICE!r}.")

ACCELERATOR_ONLY = _COLLECTIVES[DEVICE]  # for init_process_group: a group that does not serve the CPU
BACKENDS = f"cpu:gloo,{DEVICE}:{ACCELERATOR_ONLY}"
MOST_RANKS = 4  # of a machine with many GPUs
ROUNDING = 1e-9  # relative, in float64: CUDA's kernels add in another order, and that adds up over a few steps

simulation_only = pytest.mark.skipif(DEVICE != "sim", reason="only the simulated device can tell")


def missing() -> str:
    """What it takes to have the device and is not here; empty if it is here."""
    if DEVICE == "sim":
        return simulated.missing()
    return "" if _count() else f"a GPU, and torch {torch.__version__} sees none"


@functools.cache
def _count() -> int:
    """How many ranks can have a device of their own; of the simulated one there are as many as wanted."""
    return 3 if DEVICE == "sim" else min(torch.cuda.device_count(), MOST_RANKS)


def ranks(most: int = MOST_RANKS) -> int:
    """For a test that runs at any number of them: so many, or as many as there are devices."""
    return max(min(most, _count()), 1)


def has_two(world: int) -> bool:
    """Whether every rank can have two devices of its own."""
    return DEVICE == "sim" or 2 * world <= torch.cuda.device_count()


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
    """``harness.run_ranks`` in processes that are thrown away. Skips the test where there are too few devices."""
    if DEVICE != "sim" and world_size > _count():  # (two ranks on one GPU are refused by NCCL)
        pytest.skip(f"needs {world_size} devices, and there are {_count()}")
    return harness.run_ranks(function, world_size, *args, fresh=True, **kwargs)


def on_device(function: Callable[..., Any], backends: str = BACKENDS) -> Callable[..., Any]:
    """A function for ``run_ranks``, in processes that have the device and a group that serves it and the CPU.

    On CUDA the device of the rank is the current one. ``backends``: ``ACCELERATOR_ONLY`` is a group without the CPU.
    """
    return simulated.on_device(function, backends) if DEVICE == "sim" else _on_cuda(function, backends)


def on_accelerator_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """``on_device``, with a group that does not serve the CPU."""
    return on_device(function, ACCELERATOR_ONLY)


def _on_cuda(function: Callable[..., Any], backends: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def on_rank(rank: int, world: int, *args: Any, **kwargs: Any) -> Any:
        torch.cuda.set_device(rank)
        store = dist.PrefixStore("cuda", dist.distributed_c10d._get_default_store())
        timeout = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout
        dist.destroy_process_group()
        dist.init_process_group(backends, store=store, rank=rank, world_size=world, timeout=timeout)
        dist.all_reduce(torch.zeros(1, device="cuda"))
        result = function(rank, world, *args, **kwargs)
        torch.cuda.synchronize()  # what failed on the device is raised here and not when the process ends
        return result

    return on_rank


def device() -> torch.device:
    """The one of this rank, with its index. In a function that is ``on_device``."""
    return torch.device(DEVICE, module().current_device())


def second_device() -> torch.device:
    """Another one that no other rank has. In a function that is ``on_device``, where ``has_two``."""
    step = 1 if DEVICE == "sim" else dist.get_world_size()
    return torch.device(DEVICE, module().current_device() + step)


def module() -> Any:
    """``torch.cuda``, ``torch.sim``: streams, events, memory."""
    return torch.get_device_module(DEVICE)


def same(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 0.0, case: str = "") -> None:
    """Assert that tensors are those of the oracle on the CPU: to the bit, unless ``tolerance`` (absolute) or CUDA.

    ``case``: of several in one test, for the message.
    """
    assert len(actual) == len(expected)
    rtol, atol = (0.0, tolerance) if DEVICE == "sim" else (ROUNDING, max(tolerance, ROUNDING))
    torch.testing.assert_close(
        [one.cpu() for one in actual], list(expected), rtol=rtol, atol=atol, msg=lambda text: f"{case}\n{text}"
    )


def host_reads() -> AbstractContextManager[list[Any]]:
    """Where the host waits for the device in this context: a list that is complete at its end, a line of code each."""
    return simulated.host_reads() if DEVICE == "sim" else _cuda_host_reads()  # type: ignore[attr-defined]


@contextmanager
def _cuda_host_reads() -> Iterator[list[str]]:
    """CUDA warns of each call that waits, with the Python line. (Autograd's threads hand their warnings on.)"""
    reads: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield reads
        finally:
            torch.cuda.set_sync_debug_mode(before)
            reads += [f"{one.filename}:{one.lineno}" for one in caught if "synchronizing" in str(one.message)]


def own_reads(reads: Sequence[Any]) -> list[str]:
    """Those of ``host_reads`` that our code asked for, and not torch (DDP, GradScaler) or the test."""
    if DEVICE == "sim":
        return [str(read) for read in reads if read.origin == "shardstep"]
    return [read for read in reads if read.startswith(str(Path(shardstep.__file__).parent))]


def seed(number: int) -> None:
    """How late the simulated device is. On CUDA things are as late as they are."""
    if DEVICE == "sim":
        simulated.seed(number)

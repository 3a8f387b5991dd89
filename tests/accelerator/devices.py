"""The device of these tests: the simulated one, or with ``SHARDSTEP_ACCELERATOR=cuda`` (``make test-gpu``) a GPU.

A test that imports its device from here runs on both:

    from tests.accelerator.devices import DEVICE, on_device, run_ranks, same, sizes

    @on_device
    def _train(rank, world): ...            # tensors on DEVICE, a group that serves the CPU and DEVICE

    @pytest.mark.parametrize("world", sizes())
    def test_...(world):
        for weights in run_ranks(_train, world):
            same(weights, expected)         # bits on the simulated device, 1e-9 on CUDA, whose kernels are others

What only the simulation knows (races, what is late, the trace, poisoned memory) is marked ``simulation_only``, or left
out by what is empty on CUDA: ``seed``, ``races_ignored``, ``collectives``.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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


def sizes(*wanted: int) -> list[int]:
    """Numbers of ranks for a test: of those that are wanted, or 1, 2, 3 and as many as there are, those that can be."""
    chosen = sorted(set(wanted or (1, 2, 3, _count())))
    return [world for world in chosen if fits(world)]


def fits(world: int) -> bool:
    """Whether every rank can have a device of its own (two ranks on one GPU are refused by NCCL)."""
    return DEVICE == "sim" or world <= _count()


def has_two(world: int) -> bool:
    """Whether every rank can have two devices of its own."""
    return DEVICE == "sim" or 2 * world <= torch.cuda.device_count()


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
    """``harness.run_ranks`` in processes that are thrown away. Skips the test where there are too few devices."""
    if not fits(world_size):
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


def collectives() -> AbstractContextManager[Counter[str] | None]:
    """What was launched, by kind; None on CUDA, where nobody counts."""
    return simulated.collectives() if DEVICE == "sim" else nullcontext()


def races_ignored() -> AbstractContextManager[None]:
    """Without the race detector, of which CUDA has none."""
    return simulated.races_ignored() if DEVICE == "sim" else nullcontext()


def seed(number: int) -> None:
    """How late the simulated device is. On CUDA things are as late as they are."""
    if DEVICE == "sim":
        simulated.seed(number)


def memory_held() -> int:
    """Bytes that tensors hold on the device of this rank."""
    return module().memory_allocated()


def peak_memory() -> int:
    """The most bytes that tensors held since ``reset_peak_memory``."""
    return module().max_memory_allocated()


def reset_peak_memory() -> None:
    module().reset_peak_memory_stats()

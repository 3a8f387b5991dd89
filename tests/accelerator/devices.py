"""The device of these tests: the simulated one, or with ``SHARDSTEP_ACCELERATOR=cuda`` (``make test-gpu``) a GPU.

A test that imports its device from here runs on both:

    from tests.accelerator.devices import DEVICE, on_device, run_ranks, same, sizes

    @on_device
    def _train(rank, world): ...            # tensors on DEVICE, a group that serves the CPU and DEVICE

    @pytest.mark.parametrize("world", sizes())
    def test_...(world):
        for weights in run_ranks(_train, world):
            same(weights, expected)         # bits on the simulated device, 1e-9 on CUDA, whose kernels are others

What only the simulation knows (races, what is late, the trace, poisoned memory) is marked ``simulation_only``.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

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


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
    """``harness.run_ranks`` in processes that are thrown away. Skips the test where there are too few devices."""
    if not fits(world_size):
        pytest.skip(f"needs {world_size} devices, and there are {_count()}")
    return harness.run_ranks(function, world_size, *args, fresh=True, **kwargs)


def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function for ``run_ranks``, in processes that have the device and a group that serves it and the CPU.

    On CUDA the device of the rank is the current one.
    """
    return simulated.on_device(function) if DEVICE == "sim" else _on_cuda(function)


def _on_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def on_rank(rank: int, world: int, *args: Any, **kwargs: Any) -> Any:
        torch.cuda.set_device(rank)
        store = dist.PrefixStore("cuda", dist.distributed_c10d._get_default_store())
        timeout = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout
        dist.destroy_process_group()
        dist.init_process_group(BACKENDS, store=store, rank=rank, world_size=world, timeout=timeout)
        dist.all_reduce(torch.zeros(1, device="cuda"))
        result = function(rank, world, *args, **kwargs)
        torch.cuda.synchronize()  # what failed on the device is raised here and not when the process ends
        return result

    return on_rank


def device() -> torch.device:
    """The one of this rank, with its index. In a function that is ``on_device``."""
    return torch.device(DEVICE, module().current_device())


def module() -> Any:
    """``torch.cuda``, ``torch.sim``: streams, events, memory."""
    return torch.get_device_module(DEVICE)


def same(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 0.0) -> None:
    """Assert that tensors are those of the oracle on the CPU: to the bit, unless ``tolerance`` (absolute) or CUDA."""
    assert len(actual) == len(expected)
    rtol, atol = (0.0, tolerance) if DEVICE == "sim" else (ROUNDING, max(tolerance, ROUNDING))
    torch.testing.assert_close([one.cpu() for one in actual], list(expected), rtol=rtol, atol=atol)


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


def memory_held() -> int:
    """Bytes that tensors hold on the device of this rank."""
    return module().memory_allocated()


def peak_memory() -> int:
    """The most bytes that tensors held since ``reset_peak_memory``."""
    return module().max_memory_allocated()


def reset_peak_memory() -> None:
    module().reset_peak_memory_stats()

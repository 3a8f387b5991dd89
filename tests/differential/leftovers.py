"""What a case must not leave behind in its process: optimizers, slots in shared memory, threads, hooks, groups."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import torch

from shardstep import ZeroRedundancyOptimizer


class Before:
    """How the process was."""

    def __init__(self) -> None:
        self._threads = _threads()
        self._slots = _slots()
        self._hooks = _hooks()

    def check(self, slots: bool = True) -> None:
        gc.collect()
        living = [type(one).__name__ for one in gc.get_objects() if issubclass(type(one), ZeroRedundancyOptimizer)]
        assert not living, f"left behind: {len(living)} optimizers"
        for name, old, new in (
            ("threads", self._threads, _threads()),
            ("files of shared memory", self._slots, _slots() if slots else set()),
            ("hooks of all modules", self._hooks, _hooks()),
        ):
            assert not new - old, f"left behind: {name} {sorted(new - old)}"


def _threads() -> set[str]:
    """Those of Python. (Of an accelerator autograd has a thread of its own, which Python meets in a hook.)"""
    started = (thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread))
    return {thread.name for thread in started if thread.is_alive()}


def _slots() -> set[str]:
    """Of this process: those of others come and go. (A slot is unlinked when all have opened it.)"""
    return {
        line.split()[-2]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith("(deleted)") and "/dev/shm" in line
    }


def _hooks() -> set[str]:
    registered = (
        torch.nn.modules.module._global_forward_pre_hooks,
        torch.nn.modules.module._global_forward_hooks,
        torch.nn.modules.module._global_backward_hooks,
    )
    return {repr(one) for found in registered for one in found.values()}

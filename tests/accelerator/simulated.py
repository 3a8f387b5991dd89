"""The simulated device, built on first use: ``load()`` makes it known to this process as ``sim``, for good.

It has memory of another device type and the CPU's kernels (``device.cpp``), and a process group that carries its
tensors with gloo (``process_group.h``). Nothing is asynchronous on it, and nobody else has such a device: what passes
here is said to pass here. A process that has loaded it has an accelerator as far as torch is concerned, so only
processes that are thrown away load it (``on_device``).
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SOURCES = Path(__file__).parent
BACKENDS = "cpu:gloo,sim:simccl"


def _ninja() -> str | None:
    """The one of this environment, which need not be on the path, or any other."""
    own = Path(sys.executable).parent / "ninja"
    return str(own) if own.exists() else shutil.which("ninja")


def missing() -> str:
    """What it takes to build the device and is not here; empty if all is."""
    compiler = os.environ.get("CXX", "c++")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        return "torch 2.13 (earlier ones have other interfaces)"
    if shutil.which(compiler) is None:
        return f"a C++ compiler ({compiler})"
    return "" if _ninja() else "ninja"


def _folder() -> Path:
    """One for every version of the sources, of torch and of Python: it is built once on a machine."""
    files = [SOURCES / name for name in ("device.cpp", "process_group.h")]
    facts = [torch.__version__, platform.python_version(), platform.machine(), *(file.read_text() for file in files)]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "shardstep-tests" / f"sim-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / folder.name
        folder.mkdir(exist_ok=True)
    return folder


@functools.cache
def build() -> Any:
    """Build the extension, unless it is there, and import it. Others who come meanwhile wait."""
    from torch.utils import cpp_extension

    folder, ninja = _folder(), _ninja()
    if ninja is not None:
        os.environ["PATH"] = os.pathsep.join([str(Path(ninja).parent), os.environ.get("PATH", "")])
    with open(folder / "building", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return cpp_extension.load(
            "shardstep_sim",
            [str(SOURCES / "device.cpp")],
            extra_cflags=["-O1", "-w"],
            build_directory=str(folder),
        )


@functools.cache
def load() -> None:
    """Make the device and its process group known to torch, in this process."""
    extension = build()
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _module(extension))
    torch.utils.generate_methods_for_privateuse1_backend()

    def connect(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return extension.process_group(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend("simccl", connect, devices=["sim"])


def _module(extension: Any) -> types.ModuleType:
    """What torch asks of ``torch.sim``."""
    module = types.ModuleType("torch.sim")

    def index_of(device: Any) -> int:
        index = device if isinstance(device, int) or device is None else torch.device(device).index
        return extension.current_device() if index is None else index

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return extension.default_generator(index_of(device)).get_state()

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        extension.default_generator(index_of(device)).set_state(state)

    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: extension.device_count,
        current_device=extension.current_device,
        set_device=lambda device: extension.set_device(index_of(device)),
        synchronize=lambda device=None: None,
        manual_seed_all=lambda seed: None,
        get_rng_state=get_rng_state,
        set_rng_state=set_rng_state,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    return module


def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function for ``run_ranks(..., fresh=True)``, in processes that have the device and a group that serves it."""

    @functools.wraps(function)
    def on_rank(rank: int, world: int, *args: Any, **kwargs: Any) -> Any:
        load()
        store = dist.distributed_c10d._get_default_store()
        timeout = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout
        dist.destroy_process_group()
        store = dist.PrefixStore("sim", store)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.init_process_group(BACKENDS, store=store, rank=rank, world_size=world, timeout=timeout)
        dist.barrier()
        return function(rank, world, *args, **kwargs)

    return on_rank

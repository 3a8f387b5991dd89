"""The simulated device, built on first use: ``load()`` makes it known to this process as ``sim``, for good.

Two devices, ``sim:0`` and ``sim:1``, with the CPU's kernels, and with what a CUDA device has beside kernels
(``sim/*.h``): streams and events, an allocator by CUDA's rules, pinned host memory, and a process group with NCCL's
contract, ``simccl``. A race detector watches all of it. Everything is deterministic. Nobody has such a device: what
passes here is said to pass here. A process that has loaded it has an accelerator as far as torch is concerned, so only
processes that are thrown away load it (``on_device``).

``torch.sim`` has what ``torch.cuda`` has. For tests there are contexts besides, each with a list or a log of what it
has seen: ``host_reads``, ``collectives``, ``early_frees``, ``captured`` (what the capture of a CUDA graph would have
forbidden), ``tracing`` (for ``timeline.Timeline``); and ``races_ignored``, without the race detector: what is looked
at too early is NaN there.
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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

SOURCES = Path(__file__).parent / "sim"
BACKENDS = "cpu:gloo,sim:simccl"
ACCELERATOR_ONLY = "simccl"


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
    """One for every version of the sources, of torch and of Python: built once. (Ninja notes the sources' path.)"""
    files = sorted(SOURCES.iterdir())
    versions = [torch.__version__, platform.python_version(), platform.machine()]
    facts = [str(SOURCES), *versions, *(file.read_text() for file in files)]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "shardstep-tests" / f"sim-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / folder.name
        folder.mkdir(exist_ok=True)
    return folder


def is_built() -> bool:
    """Whether somebody on this machine has built it already: then ``build`` takes no time."""
    return (_folder() / "shardstep_sim.so").exists()


@functools.cache
def build() -> Any:
    """Build the extension, unless it is there, and import it. Others who come meanwhile wait."""
    from torch.utils import cpp_extension

    folder, ninja = _folder(), _ninja()
    if ninja is not None:
        os.environ["PATH"] = os.pathsep.join([str(Path(ninja).parent), os.environ.get("PATH", "")])
    with open(folder / "building", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)  # torch's own, of a process that was killed: it would wait forever
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
    extension.set_folders(f"{Path(torch.__file__).parent}/", __file__)
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

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0) -> Any:
            return super().__new__(cls, device=torch.device("sim", index_of(device)), priority=priority)

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False) -> Any:
            return super().__new__(cls, "sim", enable_timing=enable_timing)

    @contextmanager
    def stream(stream: Any) -> Iterator[None]:
        if stream is None:
            yield
            return
        here, before = torch.accelerator.current_stream(), torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:  # as torch.cuda.stream does it: the device that was current is so again
            torch.accelerator.set_stream(before)
            torch.accelerator.set_stream(here)

    @contextmanager
    def device(device: Any) -> Iterator[None]:
        before = extension.current_device()
        extension.set_device(index_of(device))
        try:
            yield
        finally:
            extension.set_device(before)

    def usage(key: str) -> Callable[..., int]:
        return lambda device=None: extension.usage(index_of(device))[key]

    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: extension.device_count,
        current_device=extension.current_device,
        set_device=lambda device: extension.set_device(index_of(device)),
        device=device,
        Stream=Stream,
        Event=Event,
        stream=stream,
        current_stream=lambda device=None: torch.accelerator.current_stream(index_of(device)),
        default_stream=lambda device=None: torch.Stream(stream_id=0, device_index=index_of(device), device_type=20),
        set_stream=torch.accelerator.set_stream,
        is_current_stream_capturing=extension.is_capturing,
        synchronize=lambda device=None: torch.accelerator.synchronize(index_of(device)),
        memory_allocated=usage("current"),
        max_memory_allocated=usage("peak"),
        memory_reserved=usage("reserved"),
        memory_held=usage("held"),
        reset_peak_memory_stats=lambda device=None: extension.reset_peak(index_of(device)),
        empty_cache=lambda: None,
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        get_rng_state=get_rng_state,
        set_rng_state=set_rng_state,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    return module


# --- what tests ask ---------------------------------------------------------------------------------------------------


class HostRead(NamedTuple):
    """What made the host wait."""

    kind: str  # "copy to the host", "copy from the host", "synchronize", "barrier", or the operation
    line: str  # the innermost one outside of torch
    innermost: str  # the innermost of all, if that is in torch

    @property
    def origin(self) -> str:
        """Whose code asked for it: "torch" (DDP, GradScaler, an optimizer), "shardstep", or "test"."""
        if self.innermost:
            return "torch"
        return "shardstep" if "/shardstep/" in self.line else "test"


@contextmanager
def host_reads() -> Iterator[list[HostRead]]:
    extension, found = build(), list[HostRead]()
    start = extension.host_read_count()
    try:
        yield found
    finally:
        found += (HostRead(*read) for read in extension.host_reads(start))


@contextmanager
def collectives() -> Iterator[Counter[str]]:
    """What was launched, by kind; coalesced collectives once."""
    extension, counts = build(), Counter[str]()
    before = extension.launched()
    try:
        yield counts
    finally:
        counts.update(extension.launched())
        counts.subtract(before)
        for kind in [kind for kind, count in counts.items() if not count]:
            del counts[kind]


class Entry(NamedTuple):
    """One line of a log, in the order of the host."""

    kind: str  # kernel, copy, collective, wait, host waits, mark, allocate, free
    stream: int  # and number: what was launched, or what is waited for
    number: int
    name: str
    bytes: int
    line: str
    group: str
    order: int  # of a collective in its group; of a wait, the stream that waits


class Log(NamedTuple):
    """What one rank has launched. Can be returned from ``run_ranks``."""

    streams: list[tuple[int, str]]  # device and name
    entries: list[Entry]

    @property
    def kernels(self) -> Counter[str]:
        """How many were launched, by name."""
        return Counter(entry.name for entry in self.entries if entry.kind == "kernel")


@contextmanager
def tracing() -> Iterator[Log]:
    extension, log = build(), Log([], [])
    start, outer = extension.trace_size(), extension.trace(True)
    try:
        yield log
    finally:
        extension.trace(outer)
        log.streams.extend(extension.stream_names())
        log.entries.extend(Entry(*entry) for entry in extension.trace_since(start))
        if not outer:
            extension.clear_trace()


def mark(name: str) -> None:
    """A place in the log."""
    build().mark(name)


class EarlyFree(NamedTuple):
    """Memory that was freed while another stream may use it: safe only if its own stream waits before it goes on."""

    stream: str  # to whose pool it belongs
    made_at: str  # lines
    use: str  # that it has not waited for: operation, stream and line
    freed_at: str


@contextmanager
def early_frees() -> Iterator[list[EarlyFree]]:
    extension, found = build(), list[EarlyFree]()
    start = extension.early_free_count()
    try:
        yield found
    finally:
        found += (EarlyFree(*one) for one in extension.early_frees(start))


@contextmanager
def captured() -> Iterator[list[str]]:
    """As if a graph was captured from the current stream: a list of what CUDA would not allow. Nothing is captured."""
    extension, forbidden = build(), list[str]()
    extension.begin_capture()
    try:
        yield forbidden
    finally:
        forbidden += extension.end_capture()


@contextmanager
def races_ignored() -> Iterator[None]:
    before = build().detect_races(False)
    try:
        yield
    finally:
        build().detect_races(before)


def seed(number: int) -> None:
    """How often an event says "not yet" before it is done."""
    build().seed(number)


def check() -> None:
    """Wait, really, for everything that was launched, and raise what went wrong. Leaves the order as it was."""
    build().check()


def on_device(function: Callable[..., Any], backends: str = BACKENDS) -> Callable[..., Any]:
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
            dist.init_process_group(backends, store=store, rank=rank, world_size=world, timeout=timeout)
            dist.barrier()
        result = function(rank, world, *args, **kwargs)
        check()
        _leave_together(store, rank, world)
        return result

    return on_rank


def _leave_together(store: dist.Store, rank: int, world: int) -> None:
    """The process ends with the call. Who ends first resets connections from which others may still read."""
    store.set(f"leaving/{rank}", "")
    with suppress(RuntimeError):  # a rank that the test has ended does not come, nor may the store be there
        store.wait([f"leaving/{other}" for other in range(world)], timedelta(seconds=3))

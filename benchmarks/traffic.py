"""What an iteration asks of the wire and of memory, counted rather than computed."""

from __future__ import annotations

import ctypes
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor


class Requests:
    """Calls of torch.distributed from Python, and the bytes that they make a rank send (the mean over the ranks)."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes = 0.0


class _Depth(threading.local):
    value = 0


def _bytes_sent(name: str, given: dict[str, Any], ranks: int) -> float:
    """What a call makes a rank send, by the textbook: no rank is sent what it has, and nothing is sent twice."""
    others = (ranks - 1) / ranks
    if name in ("isend", "send"):
        return given["tensor"].nbytes
    if name in ("irecv", "recv", "barrier"):
        return 0
    if name == "all_reduce":
        return 2 * others * given["tensor"].nbytes
    if name in ("broadcast", "reduce"):
        return others * given["tensor"].nbytes
    if name == "all_gather":
        return (ranks - 1) * given["tensor"].nbytes
    if name in ("all_gather_into_tensor", "all_gather_single"):
        return others * given["output_tensor"].nbytes
    if name in ("reduce_scatter_tensor", "reduce_scatter_single", "all_to_all_single"):
        return others * given["input"].nbytes
    tensors: list[Tensor] = given["input_list" if name == "reduce_scatter" else "input_tensor_list"]
    return others * sum(tensor.nbytes for tensor in tensors)


COUNTED = ("isend", "send", "irecv", "recv", "barrier", "all_reduce", "broadcast", "reduce", "all_gather")
COUNTED += ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single")
COUNTED += ("all_to_all_single", "reduce_scatter", "all_to_all")


@contextmanager
def counted_requests() -> Iterator[Requests]:
    """Count the calls of all threads. What C++ asks for (DDP's all-reduce) is not seen here, but by sent_bytes."""
    requests, depth, ranks = Requests(), _Depth(), dist.get_world_size()

    def counting(name: str, original: Callable) -> Callable:
        signature = inspect.signature(original)

        def call(*args: Any, **kwargs: Any) -> Any:
            if depth.value == 0:  # some are made of others
                requests.calls[name] += 1
                requests.bytes += _bytes_sent(name, signature.bind(*args, **kwargs).arguments, ranks)
            depth.value += 1
            try:
                return original(*args, **kwargs)
            finally:
                depth.value -= 1

        return call

    originals = {name: getattr(dist, name) for name in COUNTED}
    places = (dist, dist.distributed_c10d)
    for name, original in originals.items():
        replacement = counting(name, original)
        for place in places:
            setattr(place, name, replacement)
    try:
        yield requests
    finally:
        for name, original in originals.items():
            for place in places:
                setattr(place, name, original)


def sent_bytes() -> int:
    """All bytes that this process has written so far, from the kernel: gloo's sockets are most of it."""
    return _number_of("wchar", Path("/proc/self/io"))


def _number_of(field: str, file: Path) -> int:
    line = next(row for row in file.read_text().splitlines() if row.startswith(field))
    return int(line.split()[1])


def shared_bytes() -> int:
    """Memory that shardstep has mapped to share it with the other ranks."""
    total = 0
    for row in Path("/proc/self/maps").read_text().splitlines():
        if "/dev/shm/shardstep-" in row:
            start, end = row.split()[0].split("-")
            total += int(end, 16) - int(start, 16)
    return total


class _Usage(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")
        + ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def allocated_bytes() -> int:
    """Memory that this process has allocated and not freed, all threads, C++ and Python alike: what glibc counts."""
    mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo2.restype = _Usage
    usage = mallinfo2()
    return usage.uordblks + usage.hblkhd


class Peak:
    """The most that was allocated at any time in between, looked at every half millisecond."""

    def __enter__(self) -> Peak:
        self.bytes = allocated_bytes()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.0005):
            self.bytes = max(self.bytes, allocated_bytes())

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._watcher.join()

"""Streams of an accelerator: what runs beside the computation, and what waits for what.

Calls from the host only enqueue. Work on one stream runs in its order; between streams nothing is ordered but by what
is said here, and nothing here makes the host wait. On the CPU, and where a device has no streams, all of this is
nothing and costs nothing: what a call does is done when it returns.

[Note: whose memory]
Memory is given out and taken back in the order of the stream that was current when it was made. A tensor that is used
on another stream must stay referenced until its own stream has waited for that use (``Mark.wait``, ``join``). We do
that, and never ``record_stream``, which gives memory back at a time that nobody can foresee.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch


class Mark:
    """A point in the order of a stream."""

    def __init__(self, event: Any = None, device: torch.device | None = None) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        """The current stream goes on when that point is reached. The host does not wait."""
        if self._event is not None:
            self.hold(current_stream(self._device))  # type: ignore[arg-type]

    def hold(self, stream: Any) -> None:
        """``stream`` goes on when that point is reached."""
        if self._event is not None:
            stream.wait_event(self._event)

    def wait_on_host(self) -> None:
        """The host goes on when that point is reached. Not on the hot path."""
        if self._event is not None:
            self._event.synchronize()


class Marks:
    """Points in the order of streams, for which whoever is concerned waits."""

    def __init__(self) -> None:
        self._marks: list[Mark] = []

    def add(self, marks: Iterable[Mark]) -> None:
        self._marks += marks

    def wait(self) -> None:
        """The current streams go on when all of them are reached. The host does not wait."""
        for mark in self._marks:
            mark.wait()

    def clear(self) -> None:
        self._marks.clear()


class SideStream:
    """A stream beside the one that computes; on a device without streams, the order of the program."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device) if has_streams(device) else None
        self._stream = self._module.Stream(device=device) if self._module is not None else None

    def after_current(self) -> AbstractContextManager[None]:
        """What is launched in this context runs on this stream, after what the current stream has so far."""
        return _NOTHING if self._stream is None else self._after(current_stream(self._device))

    def current(self) -> AbstractContextManager[None]:
        """What is launched in this context runs on this stream, after what is on it already, and nothing else."""
        return _NOTHING if self._module is None else self._module.stream(self._stream)

    @contextmanager
    def _after(self, other: Any) -> Iterator[None]:
        assert self._module is not None
        assert self._stream is not None
        self._stream.wait_stream(other)
        with self._module.stream(self._stream):
            yield

    def mark(self) -> Mark:
        """Where this stream is now."""
        return Mark() if self._stream is None else Mark(self._stream.record_event(), self._device)

    def join(self) -> None:
        """The current stream goes on when all of this one is done. The host does not wait."""
        if self._stream is not None:
            current_stream(self._device).wait_stream(self._stream)


class SideStreams:
    """A side stream for every device that has streams, made when it is first asked for."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, SideStream] = {}

    def of(self, device: torch.device) -> SideStream:
        if device not in self._streams:
            self._streams[device] = SideStream(device)
        return self._streams[device]

    @contextmanager
    def after_current(self, devices: Iterable[torch.device]) -> Iterator[None]:
        """As ``SideStream.after_current``, on each of these devices."""
        with ExitStack() as stack:
            for device in devices:
                stack.enter_context(self.of(device).after_current())
            yield

    def join(self, devices: Iterable[torch.device]) -> None:
        """As ``SideStream.join``, on each of these devices."""
        for device in devices:
            self.of(device).join()


_NOTHING: AbstractContextManager[None] = nullcontext()
_COPYING = SideStreams()


def has_streams(device: torch.device) -> bool:
    """Whether calls on the device only enqueue."""
    return device.type not in ("cpu", "meta", "mps") and hasattr(torch.get_device_module(device), "Stream")


def current_stream(device: torch.device) -> Any:
    """The stream on which this thread launches, of a device that has some."""
    return torch.get_device_module(device).current_stream(device)


def copy_stream(device: torch.device) -> SideStream:
    """The stream for copies to the host, of everybody in this process.

    CUDA has 32 side streams, and hands them out in turn: who makes one for every save soon has that of the gathers.
    """
    return _COPYING.of(device)


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched now goes into a graph, which is replayed later without a word to us."""
    if not has_streams(device):
        return False
    asks = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return asks is not None and asks()


def mark_current(device: torch.device) -> Mark:
    """Where the current stream is now."""
    return Mark(current_stream(device).record_event(), device) if has_streams(device) else Mark()

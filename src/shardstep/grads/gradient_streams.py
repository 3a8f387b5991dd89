"""On accelerators: the streams on which gradients were made that are not packed yet.

A forward may compute branches on several streams, and autograd then runs each branch's backward on its own. A bucket is
packed on the stream of the gradient that completes it, or makes it the next to be sent; with several devices that may
even be a thread of autograd that knows nothing of the bucket's device. So the stream of every gradient is noted: the
one that packs waits for them, and they, whose memory it is, wait until it has packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardstep.comm.streams import current_stream, has_streams, mark_current


class GradientStreams:
    """Of one iteration, by bucket."""

    def __init__(self) -> None:
        self._made_on: dict[int, list[Any]] = {}

    def note(self, position: int, device: torch.device) -> None:
        """A gradient of this bucket has just been made, on the current stream of its device."""
        if has_streams(device):
            made_on, current = self._made_on.setdefault(position, []), current_stream(device)
            if current not in made_on:
                made_on.append(current)

    @contextmanager
    def using(self, position: int, device: torch.device) -> Iterator[None]:
        """In this context the current stream may read the gradients of this bucket; after it they may go."""
        others = self._others(position, device)
        for stream in others:
            current_stream(device).wait_stream(stream)
        yield
        if others:
            read = mark_current(device)
            for stream in others:
                read.hold(stream)

    def forget(self, position: int) -> None:
        """All of this bucket was packed."""
        self._made_on.pop(position, None)

    def _others(self, position: int, device: torch.device) -> list[Any]:
        """The streams of this bucket's gradients that are not the current one."""
        if position not in self._made_on:
            return []
        current = current_stream(device)
        return [stream for stream in self._made_on[position] if stream != current]

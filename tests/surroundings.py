"""What tests do to the process of a rank before the work begins: how bytes travel, how much fits on the disk."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


def choose(transport: str) -> None:
    """Through "sockets", or through "shared memory", which is the default. Put back after the call."""
    if transport == "sockets":
        os.environ["SHARDSTEP_SHARED_MEMORY"] = "0"


@contextmanager
def full_disk(here: bool) -> Iterator[None]:
    """On this rank no file grows beyond 20 kB: a write fails in its middle, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

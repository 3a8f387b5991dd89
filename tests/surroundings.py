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


def as_under_torchrun(rank: int, world: int) -> None:
    """Frameworks read their ranks from the environment, and take the process group that is there."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="test", HF_HUB_OFFLINE="1")

"""DCP's functions as we call them: each rank for itself, without the warning about that.

DCP would pickle the ranks' plans and send them around; ours travel as JSON.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from shardstep.checkpoint.storage import dcp_versions

_NO_DIST_WARNING = "torch.distributed is disabled, unavailable or uninitialized"


@contextmanager
def _without_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_NO_DIST_WARNING)
        yield


def save(form: dict[str, Any], writer: Any, planner: Any) -> None:
    """``dcp.save`` of one rank for itself."""
    with _without_warning():
        dcp_versions.save(form, writer, planner)


def load(form: dict[str, Any], reader: Any, planner: Any) -> None:
    """``dcp.load`` of one rank for itself."""
    with _without_warning():
        dcp_versions.load(form, reader, planner)


def save_in_thread(form: dict[str, Any], writer: Any, planner: Any, process_group: Any) -> Future[Any]:
    """``dcp.async_save`` of one rank for itself, of what is staged already."""
    warnings.filterwarnings("ignore", message=_NO_DIST_WARNING)  # for good: the warning comes from the thread
    return dcp_versions.save_in_thread(form, writer, planner, process_group)


def inner_error(error: BaseException) -> BaseException:
    """The error inside the exception that DCP wraps around it."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error

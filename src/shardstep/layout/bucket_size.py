"""How large a bucket is if the user does not say.

Small buckets hold little memory while they are filled and sent, and stay in the cache between packing, adding up and
updating. Each costs a message and some Python, so there are not many of them. What is under way on the CPU lies in
slots of shared memory, two buckets per rank without its own share; on an accelerator collectives of a few MiB leave the
wire half empty.
"""

from __future__ import annotations

_COUNT = 12  # buckets, for models of a usual size
_LEAST, _MOST_ON_CPU, _MOST = 2**20, 12 * 2**20, 25 * 2**20


def chosen_bucket_bytes(total_bytes: int, on_cpu: bool) -> int:
    """The size of a bucket for a model of ``total_bytes``."""
    return max(_LEAST, min(total_bytes // _COUNT, _MOST_ON_CPU if on_cpu else _MOST))


def checked_bucket_bytes(bucket_cap_mb: float | None) -> int | None:
    """The size that the user wants, in bytes; None if there is no wish. ValueError if it is none."""
    if bucket_cap_mb is None:
        return None
    if not isinstance(bucket_cap_mb, (int, float)) or not 0 < bucket_cap_mb < float("inf"):
        raise ValueError(
            f"bucket_cap_mb expects a size above 0 in MiB but got {bucket_cap_mb!r}. Use 25, or None to have it chosen."
        )
    return max(int(bucket_cap_mb * 2**20), 1)

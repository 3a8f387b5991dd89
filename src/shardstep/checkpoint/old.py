"""Manifests that versions 0.1 and 0.2 wrote: checksums of every block of every item, instead of one for a file.

To read old checkpoints takes nothing else. This file can be deleted when nobody has one any more.
"""

from __future__ import annotations

import base64
import hashlib
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any


def files_in(content: Mapping[str, Any], metadata: str) -> dict[str, tuple[int, str, Any]]:
    """Of every file its size, no checksum, and what ``is_sound`` is to be given instead."""
    files = {
        name: (int(file["bytes"]), "", [list(row) for row in file["items"]]) for name, file in content["files"].items()
    }
    return files | {metadata: (-1, "", str(content["metadata_sha256"]))}


def is_sound(stream: Any, expected: Any, progress: Callable[[int], None] | None = None) -> bool:
    """Whether a file is what was saved: metadata by its SHA-256, a data file item by item, without gaps."""
    if isinstance(expected, str):
        return hashlib.sha256(stream.readall()).hexdigest() == expected
    position = 0
    for offset, length, head, payload, _, frame_crc, crcs in sorted(expected):
        if offset != position or min(length, head, payload) < 0:
            return False
        before, crc, left = stream.read(head), 0, payload
        while left > 0 and (data := stream.read(min(left, 2**20))):
            crc, left = zlib.crc32(data, crc), left - len(data)
        after = stream.read(length - head - payload)
        # Running checksums, noted at the end of every block: the last one is that of the payload.
        noted = base64.b64decode(crcs, validate=True)[-4:]
        if (noted and struct.unpack("<I", noted)[0] != crc) or zlib.crc32(after, zlib.crc32(before)) != frame_crc:
            return False
        position = offset + length
        if progress is not None:
            progress(length)
    return not stream.read(1)

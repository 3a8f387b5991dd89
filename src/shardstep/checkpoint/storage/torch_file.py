"""The bytes that ``torch.save`` writes for one tensor: a head, the elements, a tail.

A DCP file is such items, one after the other. With the head and tail of a shape at hand, elements go straight from
memory to disk and back, any range of them, and the result is an archive as torch writes it. (It differs in one record,
an identification number that torch derives from the checksums and nobody reads.)
"""

from __future__ import annotations

import ctypes
import os
import struct
import zipfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Tensors that are not in host memory pass through it in parts of this size.
WINDOW_BYTES = 16 * 2**20
_KEPT = 16 * 1024  # more than any head or tail has
_CENTRAL, _LOCAL, _DESCRIPTOR = b"PK\x01\x02", b"PK\x03\x04", b"PK\x07\x08"


class Frame(NamedTuple):
    """What surrounds the elements of a tensor of some dtype and shape."""

    head: bytes
    tail: bytes  # with zeros for the checksum of the elements
    checksum_at: tuple[int, ...]  # where the checksum stands in the tail

    def tail_for(self, checksum: int) -> bytes:
        tail = bytearray(self.tail)
        for position in self.checksum_at:
            struct.pack_into("<I", tail, position, checksum)
        return bytes(tail)


class _Ends:
    """A file that keeps its beginning and its end only."""

    def __init__(self) -> None:
        self.size = 0
        self.first = bytearray()
        self.last = bytearray()

    def write(self, data: memoryview | bytes) -> int:
        count = len(data)
        self.first += data[: max(_KEPT - len(self.first), 0)]
        self.last = self.last[-_KEPT:] + data[-_KEPT:]
        self.size += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Leave a hole: what is known of the end begins after it."""
        self.size = self.size + offset if whence == os.SEEK_CUR else offset
        self.last = bytearray()
        return self.size

    def flush(self) -> None:
        pass


def frame_of(shape: tuple[int, ...], dtype: torch.dtype) -> Frame:
    """Save a tensor of that shape without its elements, and keep what surrounds them. (No memory is touched.)"""
    ends = _Ends()
    tensor = torch.empty(shape, dtype=dtype)
    with torch.serialization.skip_data():
        torch.save(tensor, ends)  # type: ignore[arg-type]
    first, last = bytes(ends.first), bytes(ends.last[-_KEPT:])
    beyond = ends.size - len(last)  # where ``last`` begins in the file
    entry = _entry_of_the_elements(last)
    (header,) = struct.unpack_from("<I", last, entry + 42)
    _check(first[header : header + 4] == _LOCAL)
    name_bytes, extra_bytes = struct.unpack_from("<HH", first, header + 26)
    start = header + 30 + name_bytes + extra_bytes
    descriptor = start + tensor.nbytes - beyond
    _check(last[descriptor : descriptor + 4] == _DESCRIPTOR)
    tail = bytearray(last[descriptor:])
    positions = (4, entry - descriptor + 16)
    for position in positions:
        struct.pack_into("<I", tail, position, 0)
    return Frame(first[:start], bytes(tail), positions)


def _entry_of_the_elements(last: bytes) -> int:
    """Where the archive's directory speaks of the record that holds the elements.

    From the end: the directory comes after the elements, which are whatever was in memory.
    """
    position = last.rfind(_CENTRAL)
    while position >= 0:
        (name_bytes,) = struct.unpack_from("<H", last, position + 28)
        if last[position + 46 : position + 46 + name_bytes].endswith(b"/data/0"):
            return position
        position = last.rfind(_CENTRAL, 0, position)
    raise ValueError("torch.save expects to write a record 'data/0' but did not. This version of torch is unknown.")


def _check(found: bool) -> None:
    if not found:
        raise ValueError("torch.save expects to write a zip archive but did not. This version of torch is unknown.")


def patch_checksums(path: Path, checksums: Mapping[int, int]) -> None:
    """Enter the checksums of records that were filled in later: by where in torch's archive their bytes begin."""
    with zipfile.ZipFile(path) as archive:
        start, records = archive.start_dir, archive.infolist()
    with open(path, "r+b") as stream:
        position = start
        for record in records:
            stream.seek(record.header_offset + 26)
            begin = record.header_offset + 30 + sum(struct.unpack("<HH", stream.read(4)))
            stream.seek(position)
            entry = stream.read(46)
            _check(entry[:4] == _CENTRAL)
            if begin in checksums:
                packed = struct.pack("<I", checksums[begin])
                stream.seek(position + 16)
                stream.write(packed)
                stream.seek(begin + record.file_size)
                if stream.read(4) == _DESCRIPTOR:
                    stream.seek(begin + record.file_size + 4)
                    stream.write(packed)
            position += 46 + sum(struct.unpack_from("<HHH", entry, 28))


def bytes_in(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return prod(shape) * dtype.itemsize


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, where they are. TypeError for anything else: it would read wild memory."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or is_traceable_wrapper_subclass(tensor):
        raise TypeError(
            f"expects a plain contiguous tensor in host memory but got a {type(tensor).__qualname__} on "
            f"{tensor.device} with strides {tuple(tensor.stride())}"
        )
    if tensor.nbytes == 0:
        return memoryview(bytearray())
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]  # lives as long as the view does
    return memoryview(array).cast("B")

"""The list of what a checkpoint directory holds, with checksums: ``shardstep.json``.

Beside DCP's own files, which ignore it: a directory without it is read all the same, only not checked as closely.
Checksums are CRC-32, running over an item's payload and noted at the end of every block: the last is the one that the
item's own archive has, and any range of blocks can be checked by itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FILE_NAME = "shardstep.json"
METADATA_NAME = ".metadata"  # DCP's
_VERSION = 1
_SMALLEST_BLOCK, _LARGEST_BLOCK = 2 * 1024, 64 * 1024
_BLOCKS = 256  # of an item, roughly: a rank that reads a part of it reads at most one more
_SEQUENCE = re.compile(rb'"sequence": (\d+)')


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used. The message names the file."""


class Item(NamedTuple):
    """One item of a data file: ``head`` bytes, ``payload`` bytes, and the rest of its ``length``."""

    offset: int
    length: int
    head: int
    payload: int
    block: int  # bytes of the payload between two checksums
    frame_crc: int  # of head and tail
    crcs: tuple[int, ...]  # running, at the end of every block of the payload


class FileList(NamedTuple):
    """What a data file holds."""

    size: int
    items: dict[int, Item]  # by offset


class Author(NamedTuple):
    """Who saved, of the ranks of a run: of a group of ranks its first."""

    run: str  # the same on all ranks of a job, another one in every run
    rank: int


class Manifest(NamedTuple):
    """What a checkpoint directory holds."""

    sequence: int  # the newest checkpoint of a directory has the highest
    metadata_sha256: str
    files: dict[str, FileList]
    parameters: dict[str, tuple[int, ...]]  # of the optimizer: name -> shape
    author: Author | None = None  # unless a process saved it that was alone
    orders: dict[str, list[int]] | None = None  # of tensors whose dimensions lie in another order in memory


def block_for(payload: int) -> int:
    """The size of a block of an item: a power of two, less than a hundredth of the item unless that is small."""
    block = _SMALLEST_BLOCK
    while block * 2 * _BLOCKS <= payload and block < _LARGEST_BLOCK:
        block *= 2
    return block


class RunningChecksum:
    """A checksum that is noted at the end of every block."""

    def __init__(self, block: int, value: int = 0) -> None:
        self._block, self._filled = block, 0
        self.value = value
        self.noted: list[int] = []

    def add(self, data: memoryview) -> None:
        crc32, block, noted, value = zlib.crc32, self._block, self.noted, self.value
        position = min((block - self._filled) % block, len(data))
        if position:  # the rest of a block that was begun
            value = crc32(data[:position], value)
            self._filled += position
            if self._filled == block:
                noted.append(value)
                self._filled = 0
        whole = position + (len(data) - position) // block * block
        for start in range(position, whole, block):
            value = crc32(data[start : start + block], value)
            noted.append(value)
        if whole < len(data):
            value = crc32(data[whole:], value)
            self._filled = len(data) - whole
        self.value = value

    def note(self) -> None:
        """End a block."""
        if self._filled:
            self.noted.append(self.value)
            self._filled = 0


def to_json(file: FileList) -> dict[str, Any]:
    rows = [
        [item.offset, item.length, item.head, item.payload, item.block, item.frame_crc, _packed(item.crcs)]
        for item in file.items.values()
    ]
    return {"bytes": file.size, "items": rows}


def from_json(data: dict[str, Any]) -> FileList:
    """ValueError if it makes no sense."""
    size, items = int(data["bytes"]), {}
    for offset, length, head, payload, block, frame_crc, crcs in data["items"]:
        numbers = int(offset), int(length), int(head), int(payload), int(block), int(frame_crc)
        items[numbers[0]] = Item(*numbers, _unpacked(crcs))
    for item in items.values():
        blocks = -(-item.payload // item.block) if item.block > 0 else -1
        fits = min(item[:4]) >= 0 and item.head + item.payload <= item.length and item.offset + item.length <= size
        if not fits or len(item.crcs) != blocks:
            raise ValueError(f"the item at byte {item.offset} does not fit its file")
    return FileList(size, items)


def _packed(crcs: Sequence[int]) -> str:
    return base64.b64encode(struct.pack(f"<{len(crcs)}I", *crcs)).decode()


def _unpacked(text: str) -> tuple[int, ...]:
    raw = base64.b64decode(text, validate=True)
    return struct.unpack(f"<{len(raw) // 4}I", raw)


def write(directory: Path, manifest: Manifest) -> None:
    content = {
        "version": _VERSION,
        "sequence": manifest.sequence,
        "metadata_sha256": manifest.metadata_sha256,
        "parameters": {name: list(shape) for name, shape in manifest.parameters.items()},
        "files": {name: to_json(file) for name, file in manifest.files.items()},
    }
    if manifest.author is not None:
        content["author"] = manifest.author._asdict()
    if manifest.orders:
        content["orders"] = manifest.orders
    with open(directory / FILE_NAME, "wb") as stream:
        stream.write(json.dumps({**content, "sha256": _digest(content)}).encode())
        stream.flush()
        os.fsync(stream.fileno())


def _digest(content: dict[str, Any]) -> str:
    """Of the manifest itself, without this line."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read(directory: Path) -> Manifest | None:
    """The manifest of a directory, None if it has none. CheckpointError if it cannot be read."""
    path = directory / FILE_NAME
    try:
        content = json.loads(path.read_bytes())
        if content.pop("sha256") != _digest(content):
            raise ValueError("it is damaged: its own checksum differs")
        if content["version"] != _VERSION:
            raise ValueError(f"version {_VERSION} is known, not {content['version']}")
        return Manifest(
            int(content["sequence"]),
            str(content["metadata_sha256"]),
            {str(name): from_json(file) for name, file in content["files"].items()},
            {str(name): tuple(map(int, shape)) for name, shape in content["parameters"].items()},
            Author(str(content["author"]["run"]), int(content["author"]["rank"])) if "author" in content else None,
            {str(key): list(map(int, order)) for key, order in content.get("orders", {}).items()} or None,
        )
    except FileNotFoundError:
        return None
    except Exception as error:  # of somebody else's file anything can be wrong
        raise CheckpointError(f"{path} expects a manifest of shardstep but cannot be read as one: {error!r}") from error


def sequence_of(directory: Path) -> int:
    """The sequence number alone, from the manifest's first bytes; 0 if there is none."""
    try:
        with open(directory / FILE_NAME, "rb") as stream:
            found = _SEQUENCE.search(stream.read(200))
    except OSError:
        return 0
    return int(found[1]) if found else 0


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def quick_problems(directory: Path, manifest: Manifest) -> Iterator[str]:
    """What is wrong with a directory as far as sizes and the metadata tell."""
    metadata = directory / METADATA_NAME
    if not metadata.is_file():
        yield f"{metadata} is missing"
    elif digest_of(metadata) != manifest.metadata_sha256:
        yield f"{metadata} is not the file that was saved (its SHA-256 differs)"
    for name, file in manifest.files.items():
        path = directory / name
        if not path.is_file():
            yield f"{path} is missing"
        elif path.stat().st_size != file.size:
            yield f"{path} expects {file.size} bytes but has {path.stat().st_size}"


def problems_in_file(path: Path, file: FileList, progress: Any = None) -> Iterator[str]:
    """What is wrong with a data file: every byte of it is read. ``progress`` is called with the bytes of each item."""
    try:
        with open(path, "rb") as stream:
            position = 0
            for item in sorted(file.items.values()):
                if item.offset != position:
                    yield f"{path} has bytes from {position} to {item.offset} that belong to nothing"
                if not _is_sound(stream, item):
                    yield f"{path} is damaged between bytes {item.offset} and {item.offset + item.length}"
                position = item.offset + item.length
                if progress is not None:
                    progress(item.length)
            if position != file.size or stream.read(1):
                yield f"{path} expects to end at byte {file.size}"
    except OSError as error:
        yield f"{path} cannot be read: {error}"


def _is_sound(stream: Any, item: Item) -> bool:
    stream.seek(item.offset)
    head = stream.read(item.head)
    payload = _parts_of(stream, item.payload)
    return payload_is_sound(item, payload) and frame_is_sound(item, head, stream.read(_tail_of(item)))


def _parts_of(stream: Any, count: int) -> Iterator[memoryview]:
    """The next ``count`` bytes of a stream in parts; fewer if it ends before."""
    while count > 0 and (data := stream.read(min(count, 4 * 2**20))):
        yield memoryview(data)
        count -= len(data)


def _tail_of(item: Item) -> int:
    return item.length - item.head - item.payload


def payload_is_sound(item: Item, parts: Iterable[memoryview], first: int = 0, stop: int | None = None) -> bool:
    """Whether these are the bytes of an item's payload that were saved: from block ``first`` to block ``stop``."""
    checksum = RunningChecksum(item.block, item.crcs[first - 1] if first else 0)
    for part in parts:
        checksum.add(part)
    checksum.note()
    return tuple(checksum.noted) == item.crcs[first:stop]


def frame_is_sound(item: Item, head: bytes | memoryview, tail: bytes | memoryview) -> bool:
    """Whether this is what surrounded the payload when it was saved."""
    return zlib.crc32(tail, zlib.crc32(head)) == item.frame_crc

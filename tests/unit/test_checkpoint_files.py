"""The files of a checkpoint: written as torch writes them, read without doing harm, and no crash loses one."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import signal
import struct
import subprocess
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardstep import checkpoint
from shardstep.checkpoint import CheckpointError, Reader
from shardstep.checkpoint.storage import directories, safe_metadata, torch_file
from shardstep.checkpoint.storage import manifest as manifests
from shardstep.checkpoint.storage.manifest import FileList, Item, Manifest, RunningChecksum
from tests.oracle import assert_same
from tests.twins import values

# --- frames -------------------------------------------------------------------------------------------------------

DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
]
SHAPES = [(), (1,), (3,), (2048,), (16, 1024), (1, 4099), (2, 3, 5, 7), (100_003,), (1,) * 20 + (9,)]


def bytes_of(tensor: Tensor) -> bytes:
    return bytes(torch_file.memory_of(tensor))


def framed(tensor: Tensor) -> bytes:
    frame = torch_file.frame_of(tuple(tensor.shape), tensor.dtype)
    payload = bytes_of(tensor)
    return frame.head + payload + frame.tail_for(zlib.crc32(payload))


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = torch_file.bytes_in(shape, dtype)
    raw = random.Random(count).randbytes(count) if dtype != torch.bool else bytes(i % 2 for i in range(count))
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)


def records(data: bytes) -> dict[str, tuple[bytes, int]]:
    """The archive's records, and where each begins."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        return {info.filename: (archive.read(info), info.header_offset) for info in archive.infolist()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_frame_around_elements_is_what_torch_saves(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        tensor = tensor_of(shape, dtype)
        data = framed(tensor)
        loaded = torch.load(io.BytesIO(data), weights_only=True)
        assert (loaded.dtype, loaded.shape) == (dtype, tensor.shape)
        assert bytes_of(loaded) == bytes_of(tensor)
        saved = io.BytesIO()
        torch.save(tensor, saved)
        assert len(data) == len(saved.getvalue()), f"{dtype} {shape}"
        ours, theirs = records(data), records(saved.getvalue())
        # (The id of a file is a hash of what is in it; torch reads any.)
        ours.pop("archive/.data/serialization_id")
        theirs.pop("archive/.data/serialization_id")
        assert ours == theirs, f"{dtype} {shape}"


def test_what_lies_about_in_memory_is_not_taken_for_the_frame() -> None:
    """``torch.empty`` gets memory that was a file of torch's before."""
    shapes = [(count,) for count in (2048, 2100, 3000, 4096, 1500, 1900, 2047)]
    expected = {shape: torch_file.frame_of(shape, torch.float64) for shape in shapes}
    saved = io.BytesIO()
    torch.save(torch.ones(40, dtype=torch.float64), saved)
    poison = torch.frombuffer(bytearray(saved.getvalue()), dtype=torch.uint8)
    for _ in range(20):
        for shape, frame in expected.items():
            size = 8 * shape[0]
            dirty = [poison.repeat(size // len(poison) + 1)[:size].clone() for _ in range(8)]
            del dirty
            found = torch_file.frame_of(shape, torch.float64)
            assert found.checksum_at == frame.checksum_at
            assert (len(found.head), len(found.tail)) == (len(frame.head), len(frame.tail))
    for shape in shapes:
        tensor = poison.repeat(8 * shape[0] // len(poison) + 1)[: 8 * shape[0]].view(torch.float64)
        assert bytes_of(torch.load(io.BytesIO(framed(tensor)), weights_only=True)) == bytes_of(tensor)


# --- data files ---------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(values((70, 90), 1))
        self.low = nn.Parameter(values((130, 70), 2).bfloat16())
        self.small = nn.Parameter(values((5,), 3))
        self.scalar = nn.Parameter(values((), 4))
        self.images = nn.Parameter(values((20, 8, 9, 7), 5).to(memory_format=torch.channels_last))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("nothing", torch.zeros(0, 3))


def trained(steps: int = 1) -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(steps):
        for position, param in enumerate(model.parameters()):
            param.grad = values(param.shape, 100 * number + position, param.dtype)
        optimizer.step()
    return model, optimizer


def saved(path: Path, steps: int = 1, **options: Any) -> Path:
    model, optimizer = trained(steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.save(path, optimizer, model, {"steps": steps, "tree": {"a": [1, (2.5, "x")]}}, **options)
    return path


def loaded(path: Path) -> tuple[dict[str, Any], Net, torch.optim.Optimizer]:
    model, optimizer = trained(0)
    return checkpoint.load(path, optimizer, model), model, optimizer


def assert_holds(path: Path, steps: int) -> None:
    """A checkpoint is whole, and of this number of steps."""
    checkpoint.verify(path)
    extra, model, optimizer = loaded(path)
    oracle, plain = trained(steps)
    assert extra == {"steps": steps, "tree": {"a": [1, (2.5, "x")]}}
    assert_same(dict(model.state_dict()), dict(oracle.state_dict()), str(path))
    assert_same(optimizer.state_dict(), plain.state_dict(), str(path))


def test_a_data_file_is_archives_of_torch_one_after_the_other(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    assert_holds(path, 1)
    manifest = manifests.read(path)
    assert manifest is not None
    assert sum(bool(item.head) for item in manifest.files["__0_0.distcp"].items.values()) >= 6, "the large ones"
    data = (path / "__0_0.distcp").read_bytes()
    metadata = Reader(path).read_metadata()
    assert set(manifest.files["__0_0.distcp"].items) == {info.offset for info in metadata.storage_data.values()}
    for index, info in metadata.storage_data.items():
        part = data[info.offset : info.offset + info.length]
        records(part)
        found = torch.load(io.BytesIO(part), weights_only=True)
        if index.fqn.startswith("model."):
            assert_same(found, trained()[0].state_dict()[index.fqn.removeprefix("model.")], index.fqn)


def test_torch_opens_it_and_opens_what_torch_writes(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", 2)
    model, plain = trained(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(path, tmp_path / "c.pt")
        tree = torch.load(tmp_path / "c.pt", weights_only=True)
        dcp.save(tree, checkpoint_id=tmp_path / "dcp")
    assert_same(tree["model"], dict(model.state_dict()))
    extra, copy, optimizer = loaded(tmp_path / "dcp")
    assert extra == {"steps": 2, "tree": {"a": [1, (2.5, "x")]}}
    assert_same(dict(copy.state_dict()), dict(model.state_dict()))
    assert_same(optimizer.state_dict(), plain.state_dict())
    checkpoint.verify(tmp_path / "dcp")  # by the checksums of torch's archives


def test_dcp_reads_through_the_reader_and_finds_damage(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    target = {"model": {"large": torch.empty(70, 90, dtype=torch.float64)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, storage_reader=Reader(path))
    assert_same(target["model"]["large"], trained()[0].large.detach())
    info = next(i for x, i in Reader(path).read_metadata().storage_data.items() if x.fqn == "model.large")
    data = bytearray((path / info.relative_path).read_bytes())
    data[info.offset + info.length // 2] ^= 1
    (path / info.relative_path).write_bytes(data)
    with pytest.raises(CheckpointException, match=r"__0_0\.distcp is damaged"):
        dcp.load(target, storage_reader=Reader(path))


def test_verify_finds_every_flipped_bit(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    file = path / "__0_0.distcp"
    data = file.read_bytes()
    chance = random.Random(5)
    places = [0, len(data) - 1, *(chance.randrange(len(data)) for _ in range(150))]
    with open(file, "r+b", buffering=0) as stream:
        for place in places:
            stream.seek(place)
            stream.write(bytes([data[place] ^ (1 << chance.randrange(8))]))
            with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
                checkpoint.verify(path)
            assert checkpoint.latest(tmp_path) is None
            assert checkpoint.latest(tmp_path, thorough=False) == path
            stream.seek(place)
            stream.write(data[place : place + 1])
    checkpoint.verify(path)


# --- the manifest -------------------------------------------------------------------------------------------------


def a_manifest() -> Manifest:
    item = Item(0, 40000, 100, 39000, 16384, 2**32 - 1, (1, 2**32 - 1, 3))
    files = {"__0_0.distcp": FileList(40010, {0: item, 40000: Item(40000, 10, 0, 10, 8192, 0, (7,))})}
    return Manifest(12, "ab" * 32, files, {"a.b": (3, 4), "c": (), "ü": (0,)})


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert manifests.read(tmp_path) is None
    manifests.write(tmp_path, a_manifest())
    assert manifests.read(tmp_path) == a_manifest()


FOREIGN_MANIFESTS = {
    "empty": b"",
    "text": b"hello",
    "a list": b"[1, 2]",
    "a number": b"12",
    "null": b"null",
    "another dict": b"{}",
    "another version": b'{"version": 99}',
    "no unicode": b"\xff\xfe\x00",
    "deep": b"[" * 200_000,
    "infinite": b'{"version": 1, "sequence": 1e999, "metadata_sha256": "", "files": {}, "parameters": {}}',
    "not a number": b'{"version": 1, "sequence": NaN, "metadata_sha256": "", "files": {}, "parameters": {}}',
    "long number": b'{"version": 1, "sequence": ' + b"9" * 5000 + b', "metadata_sha256": "", "files": {}}',
    "files in a list": b'{"version": 1, "sequence": 1, "metadata_sha256": "", "files": [], "parameters": {}}',
    "file is null": b'{"version": 1, "sequence": 1, "metadata_sha256": "", "files": {"a": null}, "parameters": {}}',
}


@pytest.mark.parametrize("kind", FOREIGN_MANIFESTS)
def test_a_foreign_manifest_is_named_and_its_directory_skipped(kind: str, tmp_path: Path) -> None:
    older, path = saved(tmp_path / "older"), saved(tmp_path / "c")
    (path / manifests.FILE_NAME).write_bytes(FOREIGN_MANIFESTS[kind])
    for attempt in (manifests.read, checkpoint.verify, loaded):
        with pytest.raises(CheckpointError, match=r"shardstep\.json"):
            attempt(path)
    assert checkpoint.latest(tmp_path) == older


def within(seconds: int, call: Callable[[], Any]) -> Any:
    """``call()``, or an error if it takes longer."""

    def ring(*_: Any) -> None:
        raise AssertionError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        return call()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def file_with(**fields: Any) -> Callable[[Manifest], Manifest]:
    """The manifest, with another description of the data file."""

    def change(manifest: Manifest) -> Manifest:
        return manifest._replace(files={name: file._replace(**fields) for name, file in manifest.files.items()})

    return change


def items_with(**fields: Any) -> Callable[[Manifest], Manifest]:
    """The manifest, with another description of every item."""

    def change(manifest: Manifest) -> Manifest:
        (file,) = manifest.files.values()
        return file_with(items={at: item._replace(**fields) for at, item in file.items.items()})(manifest)

    return change


def with_another_file(name: str) -> Callable[[Manifest], Manifest]:
    return lambda manifest: manifest._replace(files={**manifest.files, name: manifest.files["__0_0.distcp"]})


IMPOSSIBLE: dict[str, Callable[[Manifest], Manifest]] = {
    "blocks of nothing": items_with(block=0),
    "negative blocks": items_with(block=-16384),
    "smaller blocks": items_with(block=1000),
    "no items": file_with(items={}),
    "another size": file_with(size=12345),
    "another digest": lambda manifest: manifest._replace(metadata_sha256="0" * 64),
    "no files": lambda manifest: manifest._replace(files={}),
    "one file more": with_another_file("__1_0.distcp"),
    "a file outside": with_another_file("../../../../../../etc/passwd"),
}


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_a_manifest_that_contradicts_the_files_is_an_error_in_bounded_time(kind: str, tmp_path: Path) -> None:
    older, path = saved(tmp_path / "older"), saved(tmp_path / "c")
    manifest = manifests.read(path)
    assert manifest is not None
    manifests.write(path, IMPOSSIBLE[kind](manifest))
    for attempt in (loaded, checkpoint.verify):
        with pytest.raises(CheckpointError, match=str(path)):
            within(5, lambda attempt=attempt: attempt(path))
    if kind != "no files":  # (nobody but a forger writes that)
        assert within(5, lambda: checkpoint.latest(tmp_path)) == older


def test_a_flipped_bit_in_the_manifest_is_found_wherever_it_is(tmp_path: Path) -> None:
    """Also where the text stays valid: the order of checkpoints, names and shapes."""
    path = saved(tmp_path / "c")
    file = path / manifests.FILE_NAME
    data = file.read_bytes()
    chance = random.Random(8)
    places = [data.index(b'"sequence": ') + 12, data.index(b'"parameters": ') + 17, data.index(b"[70, 90]") + 1]
    places += [chance.randrange(len(data)) for _ in range(200)]
    unseen: list[Any] = []
    for place in places:
        flipped = bytearray(data)
        flipped[place] ^= 1 << chance.randrange(3)
        file.write_bytes(flipped)
        what = bytes(flipped[max(place - 20, 0) : place + 10])
        try:
            within(5, lambda: checkpoint.verify(path))
            unseen.append(what)
        except CheckpointError:
            pass
        except Exception as error:
            unseen.append(f"{what!r}: {type(error).__name__}: {error}")
    file.write_bytes(data)
    checkpoint.verify(path)
    assert not unseen, f"{len(unseen)} of {len(places)} flips are not found: {unseen[:10]}"


def test_checksums_of_blocks_do_not_depend_on_how_the_data_comes() -> None:
    data = memoryview(random.Random(1).randbytes(100_000))
    whole = RunningChecksum(4096)
    whole.add(data)
    whole.note()
    assert whole.noted == [zlib.crc32(data[:end]) for end in [*range(4096, 100_000, 4096), 100_000]]
    for size in (1, 4095, 4096, 4097, 99_999):
        parts = RunningChecksum(4096)
        for start in range(0, len(data), size):
            parts.add(data[start : start + size])
        parts.note()
        assert parts.noted == whole.noted
    # From any block on, with what was noted before it.
    tail = RunningChecksum(4096, whole.noted[4])
    tail.add(data[5 * 4096 :])
    tail.note()
    assert tail.noted == whole.noted[5:]


# --- metadata that does harm --------------------------------------------------------------------------------------


class Call:
    """Unpickled, it calls."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.what = function, args

    def __reduce__(self) -> Any:
        return self.what


def good_metadata() -> dcp_metadata.Metadata:
    properties = dcp_metadata.TensorProperties(dtype=torch.float64)
    chunk = dcp_metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))
    entry = dcp_metadata.TensorStorageMetadata(properties, torch.Size([3]), [chunk])
    index = dcp_metadata.MetadataIndex("a", [0], 0)
    return dcp_metadata.Metadata({"a": entry}, {"a": ("a",)}, {index: _StorageInfo("__0_0.distcp", 0, 10)})


def text_pickle(*opcodes: bytes) -> bytes:
    return b"\x80\x02" + b"".join(opcodes) + b"."


def attribute_of(module: str, name: str, attribute: str) -> bytes:
    """A pickle that sets an attribute of a class (not of an instance) to 1, through the state of a slotted object."""
    return text_pickle(
        f"c{module}\n{name}\n".encode(), b"N}X", struct.pack("<I", len(attribute)), attribute.encode(), b"K\x01s\x86b"
    )


def malicious(tmp_path: Path) -> Iterator[tuple[str, bytes]]:
    mark = str(tmp_path / "ran")
    yield "os.system", pickle.dumps(Call(os.system, f"touch {mark}"))
    yield "eval", pickle.dumps(Call(eval, f"open({mark!r}, 'w')"))
    yield "exec", pickle.dumps(Call(exec, f"open({mark!r}, 'w')"))
    yield "open", pickle.dumps(Call(open, mark, "w"))
    yield "getattr", pickle.dumps(Call(getattr, 1, "real"))
    yield "torch.load", pickle.dumps(Call(torch.load, mark))
    yield (
        "subprocess",
        b"csubprocess\nPopen\n((lX\x05\x00\x00\x00touchaX" + struct.pack("<I", len(mark)) + mark.encode() + b"atR.",
    )
    for protocol in range(6):
        inside = good_metadata()
        inside.planner_data = [Call(os.system, f"touch {mark}")]  # type: ignore[assignment]
        yield f"inside of metadata, protocol {protocol}", pickle.dumps(inside, protocol)
    yield "a dotted name", text_pickle(b"\x8c\x05torch\x8c\x0cserialization.load\x93").replace(b"\x80\x02", b"\x80\x04")
    for module, name in (
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
        ("torch.distributed.checkpoint.metadata", "os"),
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "FileSystemReader"),
        ("torch", "load"),
        ("torch", "os"),
        ("torch.serialization", "_get_layout.__globals__"),
        ("pathlib", "os"),
        ("builtins", "getattr"),
        ("copyreg", "_reconstructor"),
        ("_codecs", "encode"),
    ):
        parts = [b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name)]
        yield f"{module}.{name}", b"\x80\x04" + b"".join(parts) + b"\x93."


def test_malicious_metadata_is_refused_and_nothing_of_it_runs(tmp_path: Path) -> None:
    for what, data in malicious(tmp_path):
        with pytest.raises(CheckpointError, match=r"where/\.metadata"):
            safe_metadata.loads(data, "where/.metadata")
        assert not (tmp_path / "ran").exists(), what


def test_malicious_metadata_in_a_directory_is_refused_by_everything_that_reads_it(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    model, optimizer = trained(0)
    for with_manifest in (True, False):
        if not with_manifest:
            (path / manifests.FILE_NAME).unlink()
        for what, data in malicious(tmp_path):
            (path / manifests.METADATA_NAME).write_bytes(data)
            for attempt in (lambda: checkpoint.load(path, optimizer, model), lambda: checkpoint.verify(path)):
                with pytest.raises(CheckpointError, match=r"\.metadata"):
                    attempt()
            assert checkpoint.latest(tmp_path) is None
            if with_manifest:  # there is one, but it cannot be read: starting over would be the wrong answer
                with pytest.raises(CheckpointError, match="none can be read"):
                    checkpoint.resume(tmp_path, optimizer, model)
            else:
                assert checkpoint.resume(tmp_path, optimizer, model) is None
            assert not (tmp_path / "ran").exists(), what


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
    ],
)
def test_metadata_cannot_change_the_classes_it_consists_of(module: str, name: str) -> None:
    """A pickle may give an attribute to whatever it has found: not to a class or a function of this process."""
    data = attribute_of(module, name, "planted")
    holders = [dcp_metadata.Metadata, dcp_metadata.MetadataIndex, _StorageInfo, PosixPath, safe_metadata._layout]
    try:
        with pytest.raises(CheckpointError):
            safe_metadata.loads(data, ".metadata")
        assert not any(hasattr(holder, "planted") for holder in holders)
    finally:
        for holder in (*holders, *PosixPath.__mro__[:-1]):
            if "planted" in vars(holder):
                delattr(holder, "planted")


FOREIGN_METADATA = {
    "empty": b"",
    "text": b"hello, world\n",
    "JSON": b'{"state_dict_metadata": {}}',
    "noise": random.Random(2).randbytes(500),
    "a dict": pickle.dumps({"a": 1}),
    "None": pickle.dumps(None),
    "a size": pickle.dumps(torch.Size([1])),
    "metadata of nothing": pickle.dumps(dcp_metadata.Metadata(None)),  # type: ignore[arg-type]
    "metadata of a list": pickle.dumps(dcp_metadata.Metadata([1])),  # type: ignore[arg-type]
    "metadata without fields": b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81.",
    "the class": b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n.",
    "an archive": framed(torch.zeros(10)),
}


@pytest.mark.parametrize("kind", FOREIGN_METADATA)
def test_foreign_metadata_is_named(kind: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"where/\.metadata"):
        safe_metadata.loads(FOREIGN_METADATA[kind], "where/.metadata")


def metadata_with(**fields: Any) -> dcp_metadata.Metadata:
    found = good_metadata()
    for name, value in fields.items():
        setattr(found, name, value)
    return found


ODD_METADATA = {
    "an entry that is a number": metadata_with(state_dict_metadata={"a": 5}),
    "a place that is a number": metadata_with(storage_data={dcp_metadata.MetadataIndex("a", [0], 0): 5}),
    "places in a list": metadata_with(storage_data=[1, 2]),
    "no places": metadata_with(storage_data=None),
    "places of nothing": metadata_with(storage_data={}),
    "paths in a list": metadata_with(planner_data=[1]),
    "paths that are numbers": metadata_with(planner_data={"a": 5}),
    "paths that lack an entry": metadata_with(planner_data={}),
    "paths that are empty": metadata_with(planner_data={"a": ()}),
    "a place at a negative offset": metadata_with(
        storage_data={dcp_metadata.MetadataIndex("a", [0], 0): _StorageInfo("__0_0.distcp", -5, 10)}
    ),
    "a place of a negative length": metadata_with(
        storage_data={dcp_metadata.MetadataIndex("a", [0], 0): _StorageInfo("__0_0.distcp", 0, -10)}
    ),
    "a place without a name": metadata_with(
        storage_data={dcp_metadata.MetadataIndex("a", [0], 0): _StorageInfo(None, 0, 10)}  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("kind", ODD_METADATA)
def test_metadata_that_makes_no_sense_is_a_checkpoint_error(kind: str, tmp_path: Path) -> None:
    """In a directory of DCP: without a manifest nothing but the content tells."""
    path = saved(tmp_path / "c")
    (path / manifests.FILE_NAME).unlink()
    (path / manifests.METADATA_NAME).write_bytes(pickle.dumps(ODD_METADATA[kind]))
    with pytest.raises(CheckpointError, match=str(path)):
        loaded(path)


@pytest.mark.again  # (the next one asks every reader)
def test_metadata_is_checked_under_python_O_too(tmp_path: Path) -> None:
    """``python -O`` leaves asserts out, so the checks must not be asserts. One process, every kind of nonsense."""
    for position, kind in enumerate(ODD_METADATA):
        (tmp_path / str(position)).write_bytes(pickle.dumps(ODD_METADATA[kind]))
    (tmp_path / "good").write_bytes(pickle.dumps(good_metadata()))
    code = """
import sys
from pathlib import Path
from shardstep.checkpoint.storage import safe_metadata
from shardstep.checkpoint.storage.manifest import CheckpointError
if __debug__:
    sys.exit("asserts are on")
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        safe_metadata.loads(path.read_bytes(), path)
    except CheckpointError as error:
        print("refused", path.name, error)
    else:
        print("taken", path.name)
"""
    done = subprocess.run([sys.executable, "-O", "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    taken = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("taken")]
    harmless = [str(position) for position, kind in enumerate(ODD_METADATA) if kind == "places of nothing"]
    assert sorted(taken) == sorted([*harmless, "good"]), done.stdout  # (that one is noticed when an item is read)


@pytest.mark.programs
@pytest.mark.long
def test_every_reader_refuses_malicious_metadata_under_python_O(tmp_path: Path) -> None:
    """load, inspect and convert, in one process without asserts. Nothing is run, nothing is taken for good."""
    root = saved(tmp_path / "c")
    (root / manifests.FILE_NAME).unlink()
    bad = dict(malicious(tmp_path)) | {kind: pickle.dumps(content) for kind, content in ODD_METADATA.items()}
    del bad["places of nothing"]  # is noticed when an item is read, which inspect does not
    for position, data in enumerate(bad.values()):
        shutil.copytree(root, tmp_path / "bad" / str(position))
        (tmp_path / "bad" / str(position) / manifests.METADATA_NAME).write_bytes(data)
    code = """
import sys
from pathlib import Path
from shardstep.tools import cli
from tests.unit.test_checkpoint_files import CheckpointError, loaded
if __debug__:
    sys.exit("asserts are on")
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        loaded(path)
    except CheckpointError:
        print("refused")
    for command in (["inspect", path], ["convert", path, path.with_suffix(".pt")]):
        print("refused" if cli.main(list(map(str, command))) else "taken")
"""
    done = subprocess.run(
        [sys.executable, "-O", "-W", "ignore", "-c", code, str(tmp_path / "bad")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("refused") == 3 * len(bad), done.stdout + done.stderr
    assert not (tmp_path / "ran").exists()


def test_truncated_and_flipped_metadata_is_a_checkpoint_error_or_metadata(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    data = (path / manifests.METADATA_NAME).read_bytes()
    (path / manifests.FILE_NAME).unlink()
    assert isinstance(safe_metadata.loads(data, "x"), dcp_metadata.Metadata)
    chance = random.Random(3)
    for end in [*range(64), *(chance.randrange(len(data)) for _ in range(100)), len(data) - 1]:
        with pytest.raises(CheckpointError, match=r"c/\.metadata"):
            safe_metadata.loads(data[:end], path / manifests.METADATA_NAME)
    wrong = []
    for _ in range(400):
        damaged = bytearray(data)
        place = chance.randrange(len(data))
        damaged[place] ^= 1 << chance.randrange(8)
        (path / manifests.METADATA_NAME).write_bytes(damaged)
        try:
            loaded(path)
        except (CheckpointError, ValueError):  # ValueError: names or shapes do not match
            pass
        except Exception as error:
            wrong.append(f"byte {place}: {type(error).__name__}: {error}")
    assert not wrong, f"{len(wrong)} of 400 flips: {wrong[:5]}"


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "sub/../../secret", "..", ".", "", "sub/file", "a\0b"])
def test_a_place_outside_of_the_directory_is_refused(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    shutil.copyfile(path / "__0_0.distcp", tmp_path / "secret")
    (path / "sub").mkdir()
    metadata = pickle.loads((path / manifests.METADATA_NAME).read_bytes())
    metadata.storage_data = {
        index: _StorageInfo(name, info.offset, info.length) for index, info in metadata.storage_data.items()
    }
    (path / manifests.METADATA_NAME).write_bytes(pickle.dumps(metadata))
    for manifest in ("stale", "forged", "none"):
        if manifest == "forged":
            known = manifests.read(path)
            assert known is not None
            manifests.write(path, known._replace(metadata_sha256=manifests.digest_of(path / manifests.METADATA_NAME)))
        if manifest == "none":
            (path / manifests.FILE_NAME).unlink()
        with pytest.raises(CheckpointError, match=str(path)):
            loaded(path)


# --- directories --------------------------------------------------------------------------------------------------


def test_the_latest_is_the_one_saved_last_whatever_its_name(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nothing") is None
    assert checkpoint.latest(tmp_path) is None
    for steps, name in enumerate(("b", "step10", "step9", "a", "b"), 1):
        saved(tmp_path / name, steps)
        assert checkpoint.latest(tmp_path) == tmp_path / name
        assert checkpoint.latest(str(tmp_path) + "/") == tmp_path / name
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    assert checkpoint.latest(tmp_path) == tmp_path / "b"
    assert_holds(tmp_path / "b", 5)
    shutil.rmtree(tmp_path / "b")
    assert checkpoint.latest(tmp_path) == tmp_path / "a"
    (tmp_path / "a" / manifests.METADATA_NAME).unlink()
    assert checkpoint.latest(tmp_path) == tmp_path / "step9"
    saved(tmp_path / "c", 6)
    assert checkpoint.latest(tmp_path) == tmp_path / "c"


def test_relative_paths_and_a_directory_that_is_changed_meanwhile(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer = trained(1)
    handle = checkpoint.save("c", optimizer, model, asynchronous=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert handle.wait() == tmp_path / "c"
    monkeypatch.chdir(tmp_path)
    assert checkpoint.latest(".") == tmp_path / "c"
    assert os.listdir("elsewhere") == []


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_are_kept_and_nothing_else_is_deleted(keep: int, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "table.csv").write_text("1")
    for steps in range(1, 6):
        saved(tmp_path / f"step{steps}", steps, keep=keep)
        found = sorted(path.name for path in tmp_path.glob("step*"))
        assert found == [f"step{n}" for n in range(max(1, steps - keep + 1), steps + 1)]
    assert (tmp_path / "results" / "table.csv").exists()
    assert (tmp_path / "notes.txt").exists()
    assert_holds(tmp_path / "step5", 5)
    saved(tmp_path / "step5", 4, keep=keep)  # replaces the newest: the others stay
    assert len(list(tmp_path.glob("step*"))) == keep


def test_a_damaged_checkpoint_does_not_count_among_those_kept(tmp_path: Path) -> None:
    """Otherwise ``keep=2`` would leave one that is of no use, and the one just saved."""
    for steps in (1, 2, 3):
        saved(tmp_path / f"step{steps}", steps)
    os.truncate(tmp_path / "step3" / "__0_0.distcp", 100)
    saved(tmp_path / "step4", 4, keep=2)
    assert_holds(tmp_path / "step4", 4)
    assert_holds(tmp_path / "step2", 2)


def test_pruning_leaves_a_save_alone_that_is_going_on_beside(tmp_path: Path) -> None:
    """Two optimizers (of a GAN) save to one place, one of them in the background."""
    model, optimizer = trained(1)
    large = nn.ParameterList(nn.Parameter(torch.zeros(1000, 1000)) for _ in range(12))
    other = torch.optim.AdamW(large, lr=0.1)
    for param in large:
        param.grad = torch.ones_like(param)
    other.step()
    handle = checkpoint.save(tmp_path / "g", other, large, asynchronous=True)
    while not handle.done():
        checkpoint.save(tmp_path / "d", optimizer, model, keep=2)
    handle.wait()
    checkpoint.verify(tmp_path / "g")
    checkpoint.verify(tmp_path / "d")


# --- crashes ------------------------------------------------------------------------------------------------------

# What a save does to the disk, seen by Python's audit: before each of these the process may die.
DISK_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "os.scandir", "os.truncate")


def save_and_die(path: Path, steps: int, at: int, keep: int | None) -> bool:
    """In another process: save, and die (kill -9) before the ``at``-th touch of the disk. Whether it came so far."""
    child = os.fork()
    if child == 0:
        try:
            model, optimizer = trained(steps)
            left = at

            def die(event: str, arguments: Any) -> None:
                nonlocal left
                if event in DISK_EVENTS and str(path.parent) in str(arguments):
                    left -= 1
                    if left < 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(die)
            warnings.simplefilter("ignore")
            extra = {"steps": steps, "tree": {"a": [1, (2.5, "x")]}}
            checkpoint.save(path, optimizer, model, extra, keep=keep)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the save failed"
    return os.WIFSIGNALED(status)


def crashes(tmp_path: Path, begin: Callable[[Path], None], name: str, keep: int | None) -> Iterator[tuple[Path, int]]:
    """A save of 5 steps dies at every place there is; each time from the same beginning."""
    begin(tmp_path / "begin")
    for at in range(1000):
        parent = tmp_path / str(at)
        shutil.copytree(tmp_path / "begin", parent)
        died = save_and_die(parent / name, 5, at, keep)
        yield parent, at
        if not died:
            assert at > 10
            return
        shutil.rmtree(parent)
    raise AssertionError("a save touches the disk a thousand times")


def one_and_two(parent: Path) -> None:
    saved(parent / "one", 1)
    saved(parent / "two", 2)


def only_last(parent: Path) -> None:
    saved(parent / "last", 2)


def interrupted_between_the_renames(parent: Path) -> None:
    saved(parent / "last", 2)
    os.rename(parent / "last", parent / ".last.replaced")


def interrupted_while_the_old_one_is_deleted(parent: Path) -> None:
    saved(parent / "last", 1)
    os.rename(parent / "last", parent / ".last.replaced")
    saved(parent / "tmp", 2)
    os.rename(parent / "tmp", parent / "last")


@pytest.mark.parametrize(
    ("begin", "name", "keep"),
    [
        pytest.param(one_and_two, "new", None, marks=pytest.mark.extended),
        pytest.param(one_and_two, "new", 1, marks=pytest.mark.extended),
        pytest.param(one_and_two, "two", None, marks=pytest.mark.again),
        pytest.param(only_last, "last", None, marks=pytest.mark.again),
        pytest.param(only_last, "last", 1, marks=pytest.mark.extended),
        pytest.param(interrupted_between_the_renames, "last", None, marks=pytest.mark.extended),
        pytest.param(interrupted_between_the_renames, "new", 1, marks=pytest.mark.extended),
        (interrupted_while_the_old_one_is_deleted, "last", 1),
    ],
)
def test_a_crash_at_any_place_leaves_the_checkpoint_before_or_the_new_one(
    begin: Callable[[Path], None], name: str, keep: int | None, tmp_path: Path
) -> None:
    counts = {2: 0, 5: 0}
    for parent, at in crashes(tmp_path, begin, name, keep):
        claim = f"crash before touch {at} of the disk: {sorted(os.listdir(parent))}"
        found = checkpoint.latest(parent)
        assert found is not None, f"{claim}: nothing is left"
        model, optimizer = trained(0)
        resumed = checkpoint.resume(parent, optimizer, model)
        assert resumed is not None, claim
        assert resumed[0] == found, claim
        steps = resumed[1]["steps"]
        assert steps in counts, f"{claim}: of step {steps}"
        counts[steps] += 1
        oracle, plain = trained(steps)
        assert_same(dict(model.state_dict()), dict(oracle.state_dict()), claim)
        assert_same(optimizer.state_dict(), plain.state_dict(), claim)
        if at % 3 == 0:  # and the next save works, and leaves nothing of the crash, once that is a while ago
            let_pass(3600, parent)
            saved(parent / name, 6, keep=1)
            assert os.listdir(parent) == [name], f"{claim}: then {os.listdir(parent)}"
            assert_holds(parent / name, 6)
    assert all(counts.values()), f"deaths before and after the new one was there: {counts}"


def test_a_crash_between_the_two_renames_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    interrupted_between_the_renames(tmp_path)
    path = checkpoint.latest(tmp_path)
    assert path is not None
    assert_holds(path, 2)
    saved(tmp_path / "last", 3)
    assert os.listdir(tmp_path) == ["last"]
    assert_holds(tmp_path / "last", 3)


def let_pass(seconds: float, parent: Path) -> None:
    """Make what saves have left look so much older."""
    for path in (inner for left in parent.glob(".*") for inner in (left, *left.rglob("*"))):
        at = path.stat().st_mtime - seconds
        os.utime(path, (at, at))


def test_what_an_interrupted_save_left_is_never_the_latest_and_goes_when_nobody_writes_to_it(tmp_path: Path) -> None:
    saved(tmp_path / "a", 1)
    saved(tmp_path / "b", 2)
    left = directories.aside_of(tmp_path / "b", "0123abcd")
    os.rename(tmp_path / "b", left)
    other = directories.aside_of(tmp_path / "b.c", "0123abcd")  # of a checkpoint of another name
    shutil.copytree(left, other)
    assert checkpoint.latest(tmp_path) == tmp_path / "a"
    saved(tmp_path / "b", 3)  # another job may still be at it
    assert sorted(os.listdir(tmp_path)) == sorted([left.name, other.name, "a", "b"])
    let_pass(700, tmp_path)
    next(other.iterdir()).touch()
    saved(tmp_path / "b", 3)
    assert sorted(os.listdir(tmp_path)) == [other.name, "a", "b"]
    assert_holds(tmp_path / "b", 3)
    let_pass(25 * 3600, tmp_path)
    (tmp_path / ".d.0123456789abcdef.0.01234567.claim").touch()
    saved(tmp_path / "b", 4, keep=2)
    assert sorted(os.listdir(tmp_path)) == [".d.0123456789abcdef.0.01234567.claim", "a", "b"]
    let_pass(25 * 3600, tmp_path)
    saved(tmp_path / "b", 4, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_wrong_path_is_told_with_the_right_one(tmp_path: Path) -> None:
    path = saved(tmp_path / "run" / "step-1", 1)
    model, optimizer = trained(0)
    for read in (
        lambda wrong: checkpoint.load(wrong, optimizer, model),
        lambda wrong: checkpoint.load_model(wrong, model),
        checkpoint.load_extra,
    ):
        with pytest.raises(CheckpointError, match=rf"is a directory of checkpoints\. .* the newest is {path}"):
            read(path.parent)
        with pytest.raises(CheckpointError, match=r"holds no checkpoint \(no .metadata\)\. Check the path"):
            read(tmp_path)
        with pytest.raises(CheckpointError, match=r"nowhere does not exist\. Check the path"):
            read(tmp_path / "nowhere")
    for find in (checkpoint.latest, lambda wrong: checkpoint.resume(wrong, optimizer, model)):
        with pytest.raises(ValueError, match=rf"expects the directory that holds .* Pass {path.parent}, or load this"):
            find(path)
        assert find(tmp_path / "nowhere") is None  # the first start of a job

"""The files of a checkpoint: no crash loses one, damage is found, and reading them runs no code."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import re
import resource
import shutil
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from shardstep import checkpoint
from shardstep.checkpoint import CheckpointError, Reader, metadata
from shardstep.checkpoint.metadata import _tile as tile
from tests.checkpoints import Weights, assert_holds, die_before, everything_in, let_pass, plain
from tests.oracle import assert_same


def saved(path: Path, steps: int = 1, **options: Any) -> Path:
    model, optimizer = plain(steps)
    checkpoint.save(path, optimizer, model, {"step": steps}, **options)
    return path


def loaded(path: Path) -> dict[str, Any]:
    model, optimizer = plain(0)
    return checkpoint.load(path, optimizer, model)


# --- directories ------------------------------------------------------------------------------------------------------


def test_the_latest_is_the_one_saved_last_whatever_its_name(tmp_path):
    assert checkpoint.latest(tmp_path / "nothing") is None
    assert checkpoint.latest(tmp_path) is None
    for steps, name in enumerate(("b", "step10", "step9", "a", "b"), 1):
        saved(tmp_path / name, steps)
        assert checkpoint.latest(str(tmp_path) + "/") == tmp_path / name
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    assert checkpoint.latest(tmp_path) == tmp_path / "b"
    assert_holds(tmp_path / "b", 5)
    shutil.rmtree(tmp_path / "b")
    assert checkpoint.latest(tmp_path) == tmp_path / "a"
    (tmp_path / "a" / ".metadata").unlink()
    assert checkpoint.latest(tmp_path) == tmp_path / "step9"


def test_the_last_are_kept_damaged_ones_do_not_count_and_nothing_else_is_deleted(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "table.csv").write_text("1")
    for steps in range(1, 5):
        saved(tmp_path / f"step{steps}", steps, keep=2)
        assert sorted(path.name for path in tmp_path.glob("step*")) == [f"step{n}" for n in (steps - 1, steps) if n]
    saved(tmp_path / "step4", 4, keep=2)  # replaces the newest: the other one stays
    os.truncate(tmp_path / "step4" / "__0_0.distcp", 100)
    saved(tmp_path / "step5", 5, keep=2)
    for steps in (3, 5):
        assert_holds(tmp_path / f"step{steps}", steps)
    assert (tmp_path / "results" / "table.csv").exists()
    assert (tmp_path / "notes.txt").exists()


def test_pruning_leaves_a_save_alone_that_is_going_on_beside(tmp_path):
    """Two optimizers (of a GAN) save to one place, one of them in the background."""
    model, optimizer = plain(1)
    large, other = plain(1, Weights([(2000, 2000)]))
    handle = checkpoint.save(tmp_path / "g", other, large, asynchronous=True)
    while not handle.done():
        checkpoint.save(tmp_path / "d", optimizer, model, keep=2)
    handle.wait()
    for name in ("g", "d"):
        checkpoint.verify(tmp_path / name)


def test_links_count_for_nothing_and_nobody_deletes_or_renames_them(tmp_path):
    outside = saved(tmp_path / "elsewhere" / "best", 9)
    saved(tmp_path / "c" / "step1", 1)
    links = {"latest": "step1", "best": outside, ".best.replaced": outside, ".x.saving": outside, ".y.deleted": outside}
    for name, target in links.items():
        (tmp_path / "c" / name).symlink_to(target)
    let_pass(25 * 3600, tmp_path / "c")
    for steps in (2, 3):
        saved(tmp_path / "c" / f"step{steps}", steps, keep=2)
    assert set(os.listdir(tmp_path / "c")) == {"step2", "step3", *links}
    assert checkpoint.latest(tmp_path / "c") == tmp_path / "c" / "step3"
    assert_holds(outside, 9)


def test_a_checkpoint_without_a_manifest_is_found_and_loaded_with_a_warning(tmp_path):
    for steps in (1, 2, 3):
        saved(tmp_path / f"{9 - steps}", steps)
        os.utime(tmp_path / f"{9 - steps}" / ".metadata", (steps, steps))
    for steps in (3, 1):
        (tmp_path / f"{9 - steps}" / "shardstep.json").unlink()
        model, optimizer = plain(0)
        with pytest.warns(UserWarning, match=r"6 has no shardstep\.json"):
            found = checkpoint.resume(tmp_path, optimizer, model)
        assert found == (tmp_path / "6", {"step": 3})
        assert checkpoint.latest(tmp_path) == tmp_path / "6"
    (tmp_path / "6" / "__0_0.distcp").unlink()
    with pytest.warns(UserWarning, match="skipped"):
        assert checkpoint.resume(tmp_path, optimizer, model) == (tmp_path / "7", {"step": 2})


def test_when_no_checkpoint_can_be_read_resume_does_not_start_over(tmp_path):
    for name in ("one", "two"):
        (saved(tmp_path / name) / "__0_0.distcp").rename(tmp_path / name / "away")
    model, optimizer = plain(0)
    with pytest.raises(CheckpointError, match=r"none can be read.*two.*one"):
        checkpoint.resume(tmp_path, optimizer, model)


# --- crashes ----------------------------------------------------------------------------------------------------------


def save_and_die(path: Path, steps: int, touch: int, keep: int | None = None) -> bool:
    """In another process: save, and die before the n-th touch of the disk. Whether it came so far."""
    child = os.fork()
    if child == 0:
        try:
            warnings.simplefilter("ignore")
            die_before(touch, path.parent)
            saved(path, steps, keep=keep)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the save failed"
    return os.WIFSIGNALED(status)


def one_and_two(parent: Path) -> None:
    saved(parent / "one", 1)
    saved(parent / "two", 2)


def only_last(parent: Path) -> None:
    saved(parent / "last", 2)


def last_whose_replacement_was_interrupted(parent: Path) -> None:
    """A save died when the old checkpoint had lost its name already, if there is such a moment."""
    for touch in range(1000):
        only_last(parent)
        if not save_and_die(parent / "last", 2, touch) or not (parent / "last").exists():
            return
        shutil.rmtree(parent)


@pytest.mark.parametrize(
    ("begin", "name", "keep"),
    [
        (one_and_two, "new", 1),
        pytest.param(only_last, "last", None, marks=pytest.mark.long),
        (last_whose_replacement_was_interrupted, "last", 1),
    ],
)
def test_a_crash_at_any_place_leaves_the_checkpoint_before_or_the_new_one(begin, name, keep, tmp_path):
    """A save of 5 steps dies at every place there is; each time from the same beginning."""
    begin(tmp_path / "begin")
    counts, touch, died = {2: 0, 5: 0}, 0, True
    while died:
        parent = tmp_path / str(touch)
        shutil.copytree(tmp_path / "begin", parent)
        died = save_and_die(parent / name, 5, touch, keep)
        claim = f"crash before touch {touch} of the disk: {sorted(os.listdir(parent))}"
        model, optimizer = plain(0)
        found = checkpoint.resume(parent, optimizer, model)
        assert found is not None, f"{claim}: nothing is left"
        assert found[0] == checkpoint.latest(parent), claim
        counts[found[1]["step"]] += 1
        assert_same(everything_in(model, optimizer), everything_in(*plain(found[1]["step"])), claim)
        if touch % 3 == 0:  # and the next save works, and leaves nothing of the crash, once that is a while ago
            let_pass(3600, parent)
            saved(parent / name, 6, keep=1)
            assert os.listdir(parent) == [name], f"{claim}: then {os.listdir(parent)}"
            assert_holds(parent / name, 6)
        shutil.rmtree(parent)
        touch += 1
    assert touch > 10
    assert all(counts.values()), f"deaths before and after the new one was there: {counts}"


def test_what_a_killed_save_left_goes_when_nobody_writes_to_it_any_more(tmp_path):
    saved(tmp_path / "b", 1)
    for name in ("b", "other"):
        touch = 0
        while save_and_die(tmp_path / name, 2, touch) and not list(tmp_path.glob(f".{name}*")):
            touch += 1
    left = {path.name for path in tmp_path.iterdir()} - {"b"}
    assert len(left) > 1
    saved(tmp_path / "b", 3)  # another job may still be at it
    assert left <= set(os.listdir(tmp_path))
    let_pass(700, tmp_path)
    saved(tmp_path / "b", 4)
    assert not list(tmp_path.glob(".b*"))
    assert list(tmp_path.glob(".other*"))
    let_pass(25 * 3600, tmp_path)
    saved(tmp_path / "b", 5, keep=2)
    assert os.listdir(tmp_path) == ["b"]
    assert_holds(tmp_path / "b", 5)


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "shardstep.json"])
def test_verify_finds_every_flipped_bit_and_latest_takes_the_one_before(name, tmp_path):
    older, path = saved(tmp_path / "older"), saved(tmp_path / "c")
    data = (path / name).read_bytes()
    chance = random.Random(5)
    for place in [0, len(data) - 1, *(chance.randrange(len(data)) for _ in range(60))]:
        flipped = bytearray(data)
        flipped[place] ^= 1 << chance.randrange(8)
        (path / name).write_bytes(flipped)
        with pytest.raises(CheckpointError, match=str(path)):
            checkpoint.verify(path)
        assert checkpoint.latest(tmp_path) == older, place
    (path / name).write_bytes(data)
    assert checkpoint.latest(tmp_path) == path


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_verify_of_a_directory_of_dcp_tells_damage_and_raises_nothing_else(name, tmp_path):
    path, chance, found = saved(tmp_path / "c"), random.Random(6), 0
    (path / "shardstep.json").unlink()
    checkpoint.verify(path)
    data = (path / name).read_bytes()
    for _ in range(200):
        flipped = bytearray(data)
        flipped[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        (path / name).write_bytes(flipped)
        try:
            checkpoint.verify(path)
        except CheckpointError:
            found += 1
    assert found > 40  # (what is in no checksum of an archive is not noticed)


# --- metadata that does harm: DCP's is a pickle -----------------------------------------------------------------------


class Call:
    """Unpickled, it calls."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.what = function, args

    def __reduce__(self) -> Any:
        return self.what


def good_metadata(**fields: Any) -> dcp_metadata.Metadata:
    properties = dcp_metadata.TensorProperties(dtype=torch.float64)
    chunk = dcp_metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))
    entry = dcp_metadata.TensorStorageMetadata(properties, torch.Size([3]), [chunk])
    found = dcp_metadata.Metadata({"a": entry}, {"a": ("a",)}, {INDEX: _StorageInfo("__0_0.distcp", 0, 30)})
    for name, value in fields.items():
        setattr(found, name, value)
    return found


INDEX = dcp_metadata.MetadataIndex("a", [0], 0)
NAMES = (
    ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
    ("torch.distributed.checkpoint.metadata", "os"),
    ("torch.distributed.checkpoint.filesystem", "os.system"),
    ("torch.distributed.checkpoint.filesystem", "FileSystemReader"),
    ("torch", "load"),
    ("torch", "serialization.load"),
    ("torch.serialization", "_get_layout.__globals__"),
    ("pathlib", "os"),
    ("builtins", "getattr"),
    ("copyreg", "_reconstructor"),
    ("_codecs", "encode"),
)

HOLDERS = {
    ("torch.distributed.checkpoint.metadata", "Metadata"): dcp_metadata.Metadata,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): PosixPath,
}


def malicious(mark: Path) -> Iterator[tuple[str, bytes]]:
    code = f"open({str(mark)!r}, 'w')"
    calls = (os.system, f"touch {mark}"), (eval, code), (exec, code), (open, str(mark), "w"), (getattr, 1, "real")
    for function, *args in (*calls, (torch.load, str(mark)), (subprocess.Popen, ["touch", str(mark)])):
        yield function.__name__, pickle.dumps(Call(function, *args))
    for protocol in range(6):
        inside = good_metadata(planner_data=[Call(os.system, f"touch {mark}")])
        yield f"inside of metadata, protocol {protocol}", pickle.dumps(inside, protocol)
    for module, name in HOLDERS:  # a pickle may give an attribute to whatever it has found
        setting = (b"N}X", struct.pack("<I", 7), b"planted", b"K\x01s\x86b")
        yield f"planted in {name}", b"\x80\x02" + f"c{module}\n{name}\n".encode() + b"".join(setting) + b"."
    for module, name in NAMES:
        parts = [b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name)]
        yield f"{module}.{name}", b"\x80\x04" + b"".join(parts) + b"\x93."


# What is no metadata, or makes no sense.
ODD = {
    "empty": b"",
    "text": b"hello, world\n",
    "noise": random.Random(2).randbytes(500),
    "a dict": pickle.dumps({"a": 1}),
    "metadata without fields": b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81.",
    "the class": b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n.",
} | {
    what: pickle.dumps(good_metadata(**fields))
    for what, fields in {
        "entries in a list": {"state_dict_metadata": [1]},
        "an entry that is a number": {"state_dict_metadata": {"a": 5}},
        "a place that is a number": {"storage_data": {INDEX: 5}},
        "no places": {"storage_data": None},
        "paths that are numbers": {"planner_data": {"a": 5}},
        "paths that lack an entry": {"planner_data": {}},
        "a negative offset": {"storage_data": {INDEX: _StorageInfo("__0_0.distcp", -5, 10)}},
        "a negative length": {"storage_data": {INDEX: _StorageInfo("__0_0.distcp", 0, -10)}},
        "a place without a name": {"storage_data": {INDEX: _StorageInfo(None, 0, 10)}},
    }.items()
}


def readers(path: Path) -> list[Callable[[], Any]]:
    return [
        lambda: loaded(path),
        lambda: checkpoint.load_model(path, Weights()),
        lambda: checkpoint.load_extra(path),
        lambda: checkpoint.verify(path),
        lambda: Reader(path).read_metadata(),
    ]


def assert_refused(path: Path, mark: Path) -> None:
    for what, data in (*malicious(mark), *ODD.items()):
        (path / ".metadata").write_bytes(data)
        for attempt in readers(path):
            try:
                attempt()
            except CheckpointError as error:
                if ".metadata" not in str(error):
                    raise
            else:
                raise AssertionError(f"{what} is taken")
        if mark.exists() or any(hasattr(holder, "planted") for holder in HOLDERS.values()):
            raise AssertionError(f"{what} ran")


@pytest.mark.parametrize("checksums", [True, False])
def test_malicious_and_foreign_metadata_is_refused_by_everything_that_reads_it_and_nothing_of_it_runs(
    checksums, tmp_path
):
    path = saved(tmp_path / "c")
    if not checksums:  # a directory of DCP
        (path / "shardstep.json").unlink()
    assert_refused(path, tmp_path / "ran")
    assert checkpoint.latest(tmp_path) is None


@pytest.mark.long
def test_metadata_is_checked_under_python_O_too(tmp_path):
    """``python -O`` leaves asserts out, so the checks must not be asserts."""
    (saved(tmp_path / "c") / "shardstep.json").unlink()
    code = "import sys, pathlib as p; from tests.unit.test_checkpoint_files import assert_refused as check; "
    code += "print(__debug__); check(p.Path(sys.argv[1]), p.Path(sys.argv[2]))"
    command = [sys.executable, "-O", "-W", "ignore", "-c", code, str(tmp_path / "c"), str(tmp_path / "ran")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def hostile() -> Iterator[tuple[str, bytes]]:
    """Small files that take all memory, or never end."""
    yield "a large memo", b"\x80\x04Nr\xff\xff\xff\x1f."
    yield "many bytes", b"\x80\x05\x96\x00\x00\x00\x00\x01\x00\x00\x00."
    doubled = b"".join(b"h" + bytes([number]) + b"h" + bytes([number]) + b"\x86\x94" for number in range(200))
    yield "a key that is nested twice 200 times", b"\x80\x04})\x94" + doubled + b"Ns."
    yield "a key that is nested deeply", b"\x80\x04})" + b"\x85" * 3_000_000 + b"Ns."
    entry = good_metadata().state_dict_metadata["a"]
    lists = b"".join(b"]\x94h" + bytes([number]) + b"ah" + bytes([number]) + b"a" for number in range(3, 200))
    yield (
        "a layout that is a list of lists",
        b"\x80\x04\x8c\x13torch.serialization\x94\x8c\x0b_get_layout\x94\x93\x94]\x94" + (lists + b"\x85R."),
    )
    path = ("x",) * 10_000
    many = {f"b{number}": path for number in range(100_000)}
    yield "one long path for many keys", pickle.dumps(good_metadata(planner_data={**many, "a": ("a",)}))
    index = dcp_metadata.MetadataIndex("a.300000000", [0], 0)
    far = dcp_metadata.Metadata({"a.300000000": entry}, {"a.300000000": ("a", 300_000_000)}, {index: PLACE})
    yield "a far position", pickle.dumps(far)
    for what, sizes in {
        "a hole": [(0, 1), (2, 1)],
        "an overlap": [(0, 2), (1, 2)],
        "nothing": [],
        "less": [(0, 1)],
    }.items():
        chunks = [dcp_metadata.ChunkStorageMetadata(torch.Size([o]), torch.Size([n])) for o, n in sizes]
        torn = good_metadata()
        torn.state_dict_metadata["a"].chunks = chunks
        torn.storage_data = {dcp_metadata.MetadataIndex("a", [o], 0): PLACE for o, _ in sizes}
        yield what, pickle.dumps(torn)
    large = good_metadata()
    large.state_dict_metadata["a"].size = large.state_dict_metadata["a"].chunks[0].sizes = torch.Size([10**12])
    yield "a tensor of 8 TB", pickle.dumps(large)


PLACE = _StorageInfo("__0_0.distcp", 0, 30)


def test_small_files_take_little_memory_and_time_and_chunks_must_cover_their_tensor(tmp_path):
    path = saved(tmp_path / "c")
    (path / "shardstep.json").unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for what, data in hostile():
        (path / ".metadata").write_bytes(data)
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, hard))
        try:
            began = time.monotonic()
            for attempt in readers(path):
                with pytest.raises(CheckpointError, match="metadata"):
                    attempt()
            assert time.monotonic() - began < 20, what
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_every_tiling_is_accepted_and_nothing_else():
    """Boxes in three dimensions, cut at random; then one is moved, left out, or there twice."""
    chance = random.Random(7)
    for _ in range(200):
        boxes = [((0, 0, 0), (4, 6, 5))]
        while len(boxes) < 6:
            offsets, sizes = boxes.pop(0)
            dim = chance.randrange(3)
            at = chance.randrange(sizes[dim] + 1)
            for start, length in ((0, at), (at, sizes[dim] - at)):
                moved = tuple(o + start * (d == dim) for d, o in enumerate(offsets))
                boxes.append((moved, tuple(length if d == dim else n for d, n in enumerate(sizes))))
        full = [number for number, (_, sizes) in enumerate(boxes) if 0 not in sizes]
        wrong = chance.choice(full)
        variants = [boxes, boxes[:wrong] + boxes[wrong + 1 :], [*boxes, boxes[wrong]]]
        (offsets, sizes), other = boxes[wrong], list(boxes)
        other[wrong] = (tuple(o + (d == 0) for d, o in enumerate(offsets)), sizes)
        for variant, is_whole in zip([*variants, other], (True, False, False, False), strict=True):
            chunks = [dcp_metadata.ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in variant]
            entry = dcp_metadata.TensorStorageMetadata(dcp_metadata.TensorProperties(), torch.Size([4, 6, 5]), chunks)
            assert tile(entry) is is_whole, variant


@pytest.mark.parametrize("name", ["shardstep.json", ".metadata", "__0_0.distcp"])
def test_pipes_and_devices_are_refused_and_not_read(name, tmp_path):
    path = saved(tmp_path / "c")
    (path / name).unlink()
    for make in (lambda: os.mkfifo(path / name), lambda: (path / name).symlink_to("/dev/zero")):
        make()
        for attempt in readers(path):
            with pytest.raises(CheckpointError, match=re.escape(str(path / name))):
                attempt()
        assert checkpoint.latest(tmp_path) is None
        (path / name).unlink()


def test_a_name_in_the_manifest_that_leads_outside_is_not_read(tmp_path):
    path = saved(tmp_path / "c")
    content = json.loads((path / "shardstep.json").read_text())
    content["files"]["/etc/shadow"] = content["files"]["__0_0.distcp"]
    del content["sha256"]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (path / "shardstep.json").write_text(json.dumps({**content, "sha256": digest}))
    with pytest.raises(CheckpointError, match="outside the directory"):
        checkpoint.verify(path)


def test_fields_that_other_versions_of_torch_write_are_left_out(tmp_path):
    """As torch 2.15 writes strides, and 2.9 a version. What is known is read."""
    later = good_metadata()
    later.state_dict_metadata["a"].quality = "fine"
    later.storage_data[INDEX].compression = ["none"]
    later.epoch = 3
    found = metadata.read(pickle.dumps(later))
    assert not hasattr(found, "epoch")
    assert vars(found.storage_data[INDEX]).keys() <= vars(good_metadata().storage_data[INDEX]).keys()
    properties = dcp_metadata.TensorProperties(dtype=torch.float64)
    wider = dcp_metadata.TensorProperties()
    metadata._fill(wider, (*properties.__getstate__(), (1,)))
    assert wider == properties


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "sub/../../secret", "..", "", "sub/file", "a\0b"])
def test_a_place_outside_of_the_directory_is_refused(name, tmp_path):
    path = saved(tmp_path / "c")
    shutil.copyfile(path / "__0_0.distcp", tmp_path / "secret")
    (path / "sub").mkdir()
    metadata = Reader(path).read_metadata()
    metadata.storage_data = {
        index: _StorageInfo(name, info.offset, info.length) for index, info in metadata.storage_data.items()
    }
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    for _ in range(2):  # with the list of checksums, and without
        with pytest.raises(CheckpointError, match=str(path)):
            loaded(path)
        (path / "shardstep.json").unlink(missing_ok=True)

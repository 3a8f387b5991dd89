"""The command line: look into checkpoints, check them, turn them into plain files and back."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

from shardstep import ZeroRedundancyOptimizer, checkpoint
from shardstep.tools import cli
from tests.harness import run_ranks

WIDTH = 96
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


def new_model() -> torch.nn.Sequential:
    torch.manual_seed(3)
    layers = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 7)
    return torch.nn.Sequential(*layers).double()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(5, WIDTH, dtype=torch.float64, generator=generator)).square().mean().backward()
        optimizer.step()


def trained(make, steps: range, **options):
    model = new_model()
    optimizer = make(model.parameters(), **options)
    train(model, optimizer, steps)
    return model, optimizer


def save_sharded(rank: int, world_size: int, directory: Path) -> None:
    model, optimizer = trained(ZeroRedundancyOptimizer, range(3), optimizer_class=torch.optim.AdamW, lr=0.01)
    checkpoint.save(directory, optimizer, model, extra={"epoch": 4, "noise": torch.ones(2)})


def save_with_dcp(rank: int, world_size: int, directory: Path) -> None:
    model, optimizer = trained(ZeroRedundancyOptimizer, range(3), optimizer_class=torch.optim.AdamW, lr=0.01)
    dcp.save({"optim": optimizer.sharded_state_dict(model), "model": model.state_dict()}, checkpoint_id=directory)


def save_with_torch_zero(rank: int, world_size: int, file: Path) -> None:
    _, optimizer = trained(TorchZero, range(3), optimizer_class=torch.optim.AdamW, lr=0.01)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        torch.save(optimizer.state_dict(), file)
    dist.barrier()


def go_on_from(rank: int, world_size: int, directory: Path) -> dict[str, torch.Tensor]:
    """Load into a sharded optimizer of a model that is as far, and train on."""
    model, _ = trained(torch.optim.AdamW, range(3), lr=0.01)
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.5)
    checkpoint.load(directory, optimizer)
    train(model, optimizer, range(3, 6))
    return model.state_dict()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints") / "three-steps"
    run_ranks(save_sharded, 3, directory)
    return directory


@pytest.fixture(scope="module")
def oracle() -> torch.optim.Optimizer:
    return trained(torch.optim.AdamW, range(3), lr=0.01)[1]


@pytest.fixture(scope="module")
def six_steps() -> dict[str, torch.Tensor]:
    return trained(torch.optim.AdamW, range(6), lr=0.01)[0].state_dict()


def assert_same_state_dict(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for index, entry in expected["state"].items():
        assert found["state"][index].keys() == entry.keys()
        for key, value in entry.items():
            assert found["state"][index][key].shape == value.shape
            assert torch.equal(found["state"][index][key], value), (index, key)


def test_inspect_tells_names_shapes_dtypes_bytes_step_and_writers_as_json(saved, capsys) -> None:
    assert cli.main(["inspect", str(saved), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    entries = {entry["key"]: entry for entry in told["entries"]}
    assert told["ranks"] == [0, 1, 2]
    assert told["steps"] == [3.0]
    assert told["checksums"]
    moment = entries["optim.state.0.weight.exp_avg"]
    assert (moment["shape"], moment["dtype"], moment["bytes"]) == ([WIDTH, WIDTH], "float64", WIDTH * WIDTH * 8)
    assert moment["pieces"] > 1  # the parameter is cut
    assert {f"optim.state.{name}.{key}" for name in NAMES for key in ("step", "exp_avg", "exp_avg_sq")} <= set(entries)
    assert entries["optim.param_groups.0.lr"]["value"] == 0.01
    assert entries["extra.epoch"]["value"] == 4
    assert sum(told["files"].values()) == sum(path.stat().st_size for path in saved.glob("*.distcp"))


def test_inspect_shows_a_table(saved, capsys) -> None:
    assert cli.main(["inspect", str(saved)]) == 0
    shown = capsys.readouterr().out
    for text in ("optim.state.2.bias.exp_avg", "96x96", "float64", "written by ranks 0, 1, 2", "step 3"):
        assert text in shown


def test_the_tools_need_no_rich(saved) -> None:
    code = "import sys; sys.modules['rich'] = None; from shardstep.tools.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, "inspect", str(saved)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "optim.state.2.bias.exp_avg" in done.stdout


def test_convert_makes_the_state_dict_of_the_plain_optimizer(saved, oracle, tmp_path) -> None:
    target = tmp_path / "optimizer.pt"
    assert cli.main(["convert", str(saved), str(target)]) == 0
    assert_same_state_dict(torch.load(target, weights_only=True), oracle.state_dict())
    assert zipfile.ZipFile(target).testzip() is None
    assert [path.name for path in tmp_path.iterdir()] == ["optimizer.pt"]


def test_convert_makes_the_state_dict_of_the_model(saved, tmp_path) -> None:
    assert cli.main(["convert", str(saved), str(tmp_path / "model.pt"), "--part", "model"]) == 0
    expected = trained(torch.optim.AdamW, range(3), lr=0.01)[0].state_dict()
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_there_and_back_again_training_goes_on_exactly(saved, six_steps, tmp_path) -> None:
    assert cli.main(["convert", str(saved), str(tmp_path / "optimizer.pt")]) == 0
    assert cli.main(["convert", str(tmp_path / "optimizer.pt"), str(tmp_path / "back")]) == 0
    assert cli.main(["verify", str(tmp_path / "back")]) == 0
    for found in run_ranks(go_on_from, 2, tmp_path / "back"):
        assert all(torch.equal(found[key], value) for key, value in six_steps.items())


def test_the_state_dict_of_torchs_own_class_is_the_plain_form(oracle, six_steps, tmp_path) -> None:
    run_ranks(save_with_torch_zero, 2, tmp_path / "zero.pt")
    # It has the plain optimizer's state; its groups have the same options and parameters.
    assert_same_state_dict(torch.load(tmp_path / "zero.pt", weights_only=True), oracle.state_dict())
    assert cli.main(["convert", str(tmp_path / "zero.pt"), str(tmp_path / "checkpoint")]) == 0
    for found in run_ranks(go_on_from, 3, tmp_path / "checkpoint"):
        assert all(torch.equal(found[key], value) for key, value in six_steps.items())


def test_the_state_dict_of_fairscales_oss_is_the_plain_form(six_steps, tmp_path) -> None:
    """Runs where fairscale is: in the environment of the benchmarks."""
    pytest.importorskip("fairscale")
    run_ranks(save_with_oss, 2, tmp_path / "oss.pt")
    assert cli.main(["convert", str(tmp_path / "oss.pt"), str(tmp_path / "checkpoint")]) == 0
    for found in run_ranks(go_on_from, 2, tmp_path / "checkpoint"):
        assert all(torch.equal(found[key], value) for key, value in six_steps.items())


def save_with_oss(rank: int, world_size: int, file: Path) -> None:
    from fairscale.optim.oss import OSS

    _, optimizer = trained(OSS, range(3), optim=torch.optim.AdamW, lr=0.01)
    optimizer.consolidate_state_dict()
    if rank == 0:
        torch.save(optimizer.state_dict(), file)
    dist.barrier()


def test_convert_does_not_replace_a_checkpoint_that_may_hold_more(saved, tmp_path, capsys) -> None:
    directory = tmp_path / "there"
    _copy(saved, directory)
    assert cli.main(["convert", str(saved), str(tmp_path / "plain.pt")]) == 0
    assert cli.main(["convert", str(tmp_path / "plain.pt"), str(directory)]) == 2
    assert "holds a checkpoint" in capsys.readouterr().err
    checkpoint.verify(directory)


def test_verify_names_the_damaged_file(saved, tmp_path, capsys) -> None:
    assert cli.main(["verify", str(saved)]) == 0
    directory = tmp_path / "damaged"
    _copy(saved, directory)
    path = directory / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    capsys.readouterr()
    assert cli.main(["verify", str(directory)]) == 1
    assert str(path) in capsys.readouterr().err


def test_verify_reads_what_dcp_wrote_too(tmp_path, capsys) -> None:
    directory = tmp_path / "dcp"
    run_ranks(save_with_dcp, 2, directory)
    assert cli.main(["verify", str(directory)]) == 0
    path = directory / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    # In the middle of the largest item, a moment of the large matrix: surely in what its archive has a checksum of.
    metadata = checkpoint.Reader(directory).read_metadata()
    largest = max(
        (info for info in metadata.storage_data.values() if info.relative_path == path.name),
        key=lambda info: info.length,
    )
    data[largest.offset + largest.length // 2] ^= 1
    path.write_bytes(data)
    capsys.readouterr()
    assert cli.main(["verify", str(directory)]) == 1
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["convert"]])
def test_what_is_no_checkpoint_is_named(command, tmp_path, capsys) -> None:
    arguments = [*command, str(tmp_path)] + ([str(tmp_path / "out.pt")] if command == ["convert"] else [])
    assert cli.main(arguments) == 2  # a wrong argument, not a damaged checkpoint
    assert str(tmp_path) in capsys.readouterr().err
    assert not (tmp_path / "out.pt").exists()


def test_a_file_that_is_no_state_dict_is_named(tmp_path, capsys) -> None:
    (tmp_path / "text.pt").write_text("no archive")
    torch.save({"weights": torch.ones(3)}, tmp_path / "model.pt")
    for name, code in (("text.pt", 1), ("model.pt", 2), ("missing.pt", 2)):  # damaged, for all we know; the wrong file
        assert cli.main(["convert", str(tmp_path / name), str(tmp_path / "directory")]) == code
        assert name in capsys.readouterr().err
    assert not (tmp_path / "directory").exists()


@pytest.mark.extended
def test_convert_holds_no_more_than_a_window(tmp_path) -> None:
    """64 MiB of state in one tensor; the process may grow by half of it: a window of 16 MiB, and its surroundings."""
    param = torch.nn.Parameter(torch.zeros(4096, 4096))
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    param.grad = torch.arange(4096 * 4096, dtype=torch.float32).view(4096, 4096)
    optimizer.step()
    expected = copy.deepcopy(optimizer.state_dict())
    checkpoint.save(tmp_path / "large", optimizer)
    code = """
import sys
from pathlib import Path
from shardstep.tools import cli
from shardstep.tools.to_plain import to_plain
def status(field):
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith(field))
cli.main(["inspect", sys.argv[1], "--json"])  # everything that is imported late
to_plain(Path(sys.argv[2]), Path(sys.argv[3] + ".warm"), "optim", lambda count: None)
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
assert cli.main(["convert", sys.argv[1], sys.argv[3]]) == 0
print("grown", status("VmHWM") - before)
"""
    small = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1, momentum=0.9)
    checkpoint.save(tmp_path / "small", small)
    arguments = [str(tmp_path / "large"), str(tmp_path / "small"), str(tmp_path / "out.pt")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout.rsplit("grown", 1)[1])
    assert grown < 32 * 1024, f"{grown} kB"
    assert_same_state_dict(torch.load(tmp_path / "out.pt", weights_only=True), expected)


def _copy(source: Path, target: Path) -> None:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())

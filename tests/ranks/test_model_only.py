"""The model of a checkpoint without its optimizer, in one process without a process group."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.harness import run_ranks
from tests.oracle import assert_same

EXTRA = {"step": 7, "sizes": {"width": 6}, "noise": torch.arange(3.0)}


def new_model(width: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def save(rank: int, world: int, folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = new_model()
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    ddp(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    checkpoint.save(folder / "whole", optimizer, ddp, extra=EXTRA)
    checkpoint.save(folder / "bare", optimizer)
    return model.state_dict()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(save, 3, folder)[0]


def test_one_process_without_a_group_reads_model_and_extra(saved) -> None:
    folder, weights = saved
    assert not dist.is_initialized()
    extra = checkpoint.load_extra(folder / "whole")
    assert_same(extra, EXTRA, "extra")
    model = new_model(extra["sizes"]["width"])
    checkpoint.load_model(folder / "whole", model)
    assert_same(dict(model.state_dict()), dict(weights), "model")


def test_a_model_that_does_not_fit_is_left_alone_unless_asked(saved) -> None:
    folder, weights = saved
    model = new_model(width=8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"0\.weight of the model \(saved as \(6, 5\), is \(8, 5\)\).*strict=False"):
        checkpoint.load_model(folder / "whole", model)
    assert_same(dict(model.state_dict()), before, "model")
    with pytest.warns(UserWarning, match="does not match"):
        checkpoint.load_model(folder / "whole", model, strict=False)
    assert torch.equal(model[2].bias, weights["2.bias"])
    assert torch.equal(model[0].weight, before["0.weight"])


def test_a_checkpoint_without_a_model_says_so(saved) -> None:
    folder, _ = saved
    with pytest.raises(ValueError, match=r"expects a checkpoint with a model, but .*bare has none. Save with model="):
        checkpoint.load_model(folder / "bare", new_model())
    assert checkpoint.load_extra(folder / "bare") == {}


def test_damage_is_named_and_changes_nothing(saved, tmp_path: Path) -> None:
    folder, _ = saved
    shutil.copytree(folder / "whole", tmp_path / "damaged")
    for path in (tmp_path / "damaged").glob("*.distcp"):
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    model = new_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(checkpoint.CheckpointError, match="damaged"):
        checkpoint.load_model(tmp_path / "damaged", model)
    assert_same(dict(model.state_dict()), before, "model")


def test_what_is_no_model_or_has_no_memory_is_refused_by_name(saved) -> None:
    folder, _ = saved
    with pytest.raises(TypeError, match=r"expects a torch\.nn\.Module but got OrderedDict"):
        checkpoint.load_model(folder / "whole", new_model().state_dict())
    with torch.device("meta"):
        model = new_model()
    with pytest.raises(ValueError, match="Call to_empty first"):
        checkpoint.load_model(folder / "whole", model)


def load_into_another_class(rank: int, world: int, folder: Path) -> None:
    model = new_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.5, momentum=0.9)
    before = [dict(group, params=None) for group in optimizer.param_groups]
    with pytest.raises(
        ValueError, match=r"with the options .*betas.*momentum.* were not saved. Was another class saved"
    ):
        checkpoint.load(folder / "whole", optimizer, model)
    assert [dict(group, params=None) for group in optimizer.param_groups] == before
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()


def test_a_checkpoint_of_another_optimizer_class_is_refused_and_changes_nothing(saved) -> None:
    run_ranks(load_into_another_class, 2, saved[0])

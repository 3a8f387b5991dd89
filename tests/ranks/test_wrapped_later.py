"""``shard_gradients`` and a model that is wrapped in DDP after the optimizer was built: told at the wrap, by name.

By hand, and by the frameworks themselves. What the message says to do instead is done, and trains as plain DDP does.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import shardstep
from shardstep import ShardedGradient, ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import error_of
from tests.surroundings import as_under_torchrun

STEPS = 3


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64)


def make_optimizer(model: nn.Module, shard_gradients: bool = True) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), SGD, shard_gradients=shard_gradients, lr=0.1)


def oracle(rank: int) -> list[Tensor]:
    """Plain DDP, plain SGD."""
    ddp = DistributedDataParallel(make_model())
    optimizer = SGD(ddp.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        optimizer.step()
    return [param.detach() for param in ddp.parameters()]


def assert_trained(rank: int, model: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), oracle(rank), strict=True):
        torch.testing.assert_close(mine.detach(), theirs, rtol=1e-12, atol=1e-14)  # last bits of sums


# --- by hand ------------------------------------------------------------------------------------------------------


def by_hand(rank: int, world: int, steps_before: int, views: bool) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    for step in range(steps_before):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    whole = nn.ModuleDict({"inner": model, "beside": nn.Linear(2, 2).double()})
    for wrapped in (model, model[2], whole):
        error = error_of(
            lambda wrapped=wrapped: DistributedDataParallel(wrapped, gradient_as_bucket_view=views), "the wrap"
        )
        assert isinstance(error, ValueError)
        for words in (
            "a ZeroRedundancyOptimizer of SGD over 4 parameters",
            "Do not wrap the model",
            "shardstep.shard_ddp_gradients(ddp, optimizer) after the wrap",
        ):
            assert words in str(error), error
    # Nothing was sent and nothing is left: the model goes on as it is, and so does what the message says.
    for step in range(steps_before, STEPS):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    assert_trained(rank, model)
    DistributedDataParallel(make_model())  # somebody else's


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_a_wrap_by_hand_is_refused_where_it_is_made_and_training_goes_on_without_it(world, steps_before, views):
    run_ranks(by_hand, world, steps_before, views, timeout=60, pg_timeout=10)


def after_it_is_gone(rank: int, world: int) -> None:
    hooks = nn_module._global_module_registration_hooks
    before = len(hooks)
    model = make_model()
    optimizer = make_optimizer(model)
    assert len(hooks) == before  # one for the process
    cycle: list[Any] = [optimizer]
    cycle.append(cycle)  # alive until the collector comes
    del optimizer, cycle
    ddp = DistributedDataParallel(model)
    optimizer = make_optimizer(ddp, shard_gradients=False)
    shardstep.shard_ddp_gradients(ddp, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        assert all(isinstance(param.grad, ShardedGradient) for param in model.parameters())
        optimizer.step()
    assert_trained(rank, model)


def test_an_optimizer_that_nobody_has_any_more_does_not_object_and_the_other_way_trains_as_ddp():
    run_ranks(after_it_is_gone, 2, timeout=60, pg_timeout=10)


def no_hooks_in_forward(rank: int, world: int) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    assert not nn_module._global_forward_pre_hooks
    assert not nn_module._global_forward_hooks
    del optimizer


def test_noticing_a_wrap_puts_nothing_into_a_forward():
    run_ranks(no_hooks_in_forward, 2)


# --- by a framework -----------------------------------------------------------------------------------------------


class Model(nn.Module):
    """As HF's Trainer wants it: returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"loss": self.inner(inputs).square().mean()}


def accelerate(rank: int, folder: Path, shard_gradients: bool) -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    raw = make_model()
    model, optimizer = accelerator.prepare(raw, make_optimizer(raw, shard_gradients))
    shardstep.shard_ddp_gradients(model, optimizer)
    return train(rank, raw, model, optimizer, accelerator.backward)


def accelerate_without_the_model(rank: int, folder: Path) -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    raw = make_model()
    model = accelerator.prepare_model(raw, evaluation_mode=True)
    assert model is raw
    optimizer = accelerator.prepare(make_optimizer(model))
    return train(rank, raw, model, optimizer, accelerator.backward)


def fabric(rank: int, folder: Path, shard_gradients: bool) -> nn.Module:
    from lightning import Fabric

    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    raw = make_model()
    model, optimizer = fabric.setup(raw, make_optimizer(raw, shard_gradients))
    (ddp,) = (one for one in model.modules() if isinstance(one, DistributedDataParallel))
    shardstep.shard_ddp_gradients(ddp, optimizer)
    return train(rank, raw, model, optimizer, fabric.backward)


def fabric_without_the_model(rank: int, folder: Path) -> nn.Module:
    from lightning import Fabric

    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    raw = fabric.to_device(make_model())
    optimizer = fabric.setup_optimizers(make_optimizer(raw))
    return train(rank, raw, raw, optimizer, fabric.backward)


def train(rank: int, raw: nn.Module, model: Any, optimizer: Any, backward: Callable) -> nn.Module:
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model(batch(rank, step)).square().mean())
        assert all(isinstance(param.grad, ShardedGradient) for param in raw.parameters())
        optimizer.step()
    return raw


def lightning(rank: int, folder: Path, shard_gradients: bool) -> nn.Module:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.model, shard_gradients)

        def on_train_start(self) -> None:
            shardstep.shard_ddp_gradients(self.trainer.model, self.optimizers())

        def training_step(self, inputs: Any, position: int) -> Tensor:
            return self.model(batch(rank, position)).square().mean()

    module = Module()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(32, 1), batch_size=4))
    return module.model


def trainer(rank: int, folder: Path, shard_gradients: bool) -> nn.Module:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Connect(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **more: Any) -> None:
            shardstep.shard_ddp_gradients(trainer.model_wrapped, optimizer)

    class InOrder(Trainer):
        """The batches of this test, as they are."""

        def get_train_dataloader(self) -> Any:
            return [{"inputs": batch(rank, step)} for step in range(STEPS)]

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=STEPS,
        use_cpu=True,
        ddp_backend="gloo",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        max_grad_norm=0,
        lr_scheduler_type="constant",
    )
    model = Model()
    optimizers = (make_optimizer(model.inner, shard_gradients), None)
    trainer = InOrder(model=model, args=arguments, train_dataset=[0], optimizers=optimizers, callbacks=[Connect()])
    trainer.train()
    return model.inner


WRAPPERS: dict[Callable, tuple[str, str]] = {
    accelerate: ("accelerate", "With Accelerate: give accelerator.prepare everything but the model"),
    fabric: (
        "lightning",
        "With Fabric: Fabric(strategy=shardstep.integrations.fabric.ShardedStrategy()) does not wrap",
    ),
    lightning: ("lightning", "shardstep.shard_ddp_gradients(self.trainer.model, optimizer) in on_train_start"),
    trainer: (
        "transformers",
        "shardstep.shard_ddp_gradients(trainer.model_wrapped, optimizer) in a callback's on_train_begin",
    ),
}
WITHOUT: dict[Callable, str] = {accelerate_without_the_model: "accelerate", fabric_without_the_model: "lightning"}


def marked(ways: dict[Callable, Any], package: Callable[[Any], str]) -> list[Any]:
    marks = {"accelerate": ()}
    return [
        pytest.param(way, id=way.__name__, marks=marks.get(package(value), pytest.mark.frameworks))
        for way, value in ways.items()
    ]


def refused(rank: int, world: int, way: Callable, folder: Path) -> str:
    as_under_torchrun(rank, world)
    return str(error_of(lambda: way(rank, folder, True), "a framework that wraps the model"))


@pytest.mark.parametrize("way", marked(WRAPPERS, lambda value: value[0]))
@pytest.mark.parametrize("world", [2, 3])
def test_a_framework_that_wraps_is_told_the_way_round_for_it(way, world, tmp_path):
    """(Lightning wraps before it asks for the optimizer: there building it is what is refused.)"""
    pytest.importorskip(WRAPPERS[way][0], reason="in the environment of make test-frameworks")
    for told in run_ranks(refused, world, way, tmp_path, fresh=True, pg_timeout=20):
        assert "shard_gradients=True expects a model that is not wrapped" in told
        assert WRAPPERS[way][1] in told


def goes_round(rank: int, world: int, way: Callable, folder: Path, *shard_gradients: bool) -> None:
    as_under_torchrun(rank, world)
    model = way(rank, folder, *shard_gradients)
    gc.collect()
    assert_trained(rank, model)


@pytest.mark.parametrize("way", marked(WRAPPERS, lambda value: value[0]))
@pytest.mark.parametrize("world", [2, 3])
def test_the_way_round_trains_as_plain_ddp(way, world, tmp_path):
    pytest.importorskip(WRAPPERS[way][0], reason="in the environment of make test-frameworks")
    run_ranks(goes_round, world, way, tmp_path, False, fresh=True, pg_timeout=20)


@pytest.mark.parametrize("way", marked(WITHOUT, str))
@pytest.mark.parametrize("world", [2, 3])
def test_a_framework_that_is_not_given_the_model_trains_it_with_sharded_gradients_as_plain_ddp(way, world, tmp_path):
    pytest.importorskip(WITHOUT[way], reason="in the environment of make test-frameworks")
    run_ranks(goes_round, world, way, tmp_path, fresh=True, pg_timeout=20)

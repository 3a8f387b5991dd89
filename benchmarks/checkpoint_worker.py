"""One rank of the checkpoint benchmark. Started by ``benchmarks.checkpoint`` under torchrun."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW

from benchmarks.figures import forget_freed_memory, memory_kb, reset_peak
from shardstep import ZeroRedundancyOptimizer, checkpoint

SHAPES = [(512, 512)] * 128  # 33.6 M parameters: 268 MB of AdamW state
Action = Callable[[Path], Any]


def main() -> None:
    output, rounds, slow_rounds, folder = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    contestants = [Shardstep(), Async(), DTensors(), Plain(), Torch()]
    figures: dict[str, dict[str, list[float]]] = {}
    for turn in range(rounds + 1):
        for contestant in contestants:
            if isinstance(contestant, Torch) and turn > slow_rounds:
                continue
            measured = contestant.measure(folder)
            if turn > 0:  # the first round warms up
                for figure, value in measured.items():
                    figures.setdefault(contestant.name, {}).setdefault(figure, []).append(value)
    if dist.get_rank() == 0:
        output.write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def timed(action: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds from barrier to barrier, and the MB that the worst rank held beyond what it had before and after."""
    forget_freed_memory()
    dist.barrier()
    reset_peak()
    before = memory_kb("VmRSS")
    start = time.perf_counter()
    result = action()
    dist.barrier()
    elapsed = time.perf_counter() - start
    peak = memory_kb("VmHWM")
    forget_freed_memory()
    extra = torch.tensor([(peak - max(before, memory_kb("VmRSS"))) / 1e3])
    dist.all_reduce(extra, op=dist.ReduceOp.MAX)
    return elapsed, extra.item(), result


def parameters(with_gradients: bool = True) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    for param in params if with_gradients else ():
        param.grad = torch.randn_like(param)
    return params


def stepped(optimizer: Any) -> Any:
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


class Contestant(ABC):
    """Saves the state of one optimizer and loads it into another."""

    name: str

    @abstractmethod
    def save(self, directory: Path) -> Any: ...

    @abstractmethod
    def target(self) -> Any: ...

    @abstractmethod
    def load(self, directory: Path, target: Any) -> None: ...

    def measure(self, folder: Path) -> dict[str, float]:
        directory = folder / self.name.replace(" ", "-")
        save, save_extra, _ = timed(lambda: self.save(directory))
        target = self.target()
        load, load_extra, _ = timed(lambda: self.load(directory, target))
        if dist.get_rank() == 0:
            shutil.rmtree(directory)
        dist.barrier()
        return {"save s": save, "load s": load, "save MB": save_extra, "load MB": load_extra}


class Shardstep(Contestant):
    name = "shardstep"

    def __init__(self) -> None:
        self.optimizer = stepped(ZeroRedundancyOptimizer(parameters(), AdamW, fused=True, lr=1e-3))

    def save(self, directory: Path) -> None:
        checkpoint.save(directory, self.optimizer)

    def target(self) -> Any:
        return ZeroRedundancyOptimizer(parameters(False), AdamW, fused=True, lr=1e-3)

    def load(self, directory: Path, target: Any) -> None:
        checkpoint.load(directory, target)


class Async(Shardstep):
    """The pause is what training notices; the wait ends when the checkpoint is complete."""

    name = "shardstep asynchronous"

    def measure(self, folder: Path) -> dict[str, float]:
        directory = folder / "async"
        pause, _, handle = timed(lambda: checkpoint.save(directory, self.optimizer, asynchronous=True))
        rest, _, _ = timed(handle.wait)
        if dist.get_rank() == 0:
            shutil.rmtree(directory)
        dist.barrier()
        return {"pause s": pause, "rest s": rest}


class DTensors(Contestant):
    """What somebody with FSDP2 has: the same state, sharded along the first dimension, saved by DCP."""

    name = "DTensors in DCP"

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.state = self.form(torch.randn)

    def form(self, make: Callable[..., torch.Tensor]) -> dict[str, Any]:
        ranks = dist.get_world_size()

        def moment(shape: tuple[int, ...]) -> DTensor:
            return DTensor.from_local(make(shape[0] // ranks, *shape[1:]), self.mesh, [Shard(0)], run_check=False)

        state = {
            f"layer{i}.weight": {"step": torch.tensor(1.0), "exp_avg": moment(shape), "exp_avg_sq": moment(shape)}
            for i, shape in enumerate(SHAPES)
        }
        groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": list(state)}]
        return {"optim": {"state": state, "param_groups": groups}}

    def save(self, directory: Path) -> None:
        dcp.save(self.state, checkpoint_id=directory)

    def target(self) -> Any:
        return self.form(torch.zeros)

    def load(self, directory: Path, target: Any) -> None:
        dcp.load(target, checkpoint_id=directory)


class Plain(Contestant):
    """The limit: the same bytes, written and flushed, and read."""

    name = "plain write"

    def __init__(self) -> None:
        share = sum(torch.Size(shape).numel() for shape in SHAPES) * 8 // dist.get_world_size()
        self.tensors = torch.randn(share // 4).split(2**18)

    def save(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        with open(directory / str(dist.get_rank()), "wb", buffering=0) as stream:
            for tensor in self.tensors:
                stream.write(memoryview(tensor.numpy()).cast("B"))  # type: ignore[arg-type]
            os.fsync(stream.fileno())

    def target(self) -> Any:
        return [torch.zeros_like(tensor) for tensor in self.tensors]

    def load(self, directory: Path, target: Any) -> None:
        with open(directory / str(dist.get_rank()), "rb", buffering=0) as stream:
            for tensor in target:
                stream.readinto(memoryview(tensor.numpy()).cast("B"))  # type: ignore[arg-type]


class Torch(Contestant):
    """torch's class: collect on rank 0, torch.save there; everybody loads the file."""

    name = "torch ZeRO"

    def __init__(self) -> None:
        self.zero = stepped(TorchZero(parameters(), AdamW, fused=True, lr=1e-3))

    def save(self, directory: Path) -> None:
        self.zero.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            directory.mkdir()
            with open(directory / "optimizer.pt", "wb") as stream:
                torch.save(self.zero.state_dict(), stream)
                os.fsync(stream.fileno())
        self.zero._all_state_dicts = []

    def target(self) -> Any:
        return TorchZero(parameters(False), AdamW, fused=True, lr=1e-3)

    def load(self, directory: Path, target: Any) -> None:
        target.load_state_dict(torch.load(directory / "optimizer.pt", weights_only=True))


if __name__ == "__main__":
    main()

"""One rank of the benchmark for GPUs. Started by ``benchmarks.gpu`` under torchrun with a task, as JSON."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.contestants import Contestant, make
from benchmarks.gpt import GPT, Size, make_batch, make_gpt
from benchmarks.step_worker import attempt

LARGE, TINY = Size(12, 768, 12, 8192, 512), Size(2, 32, 2, 64, 16)  # 98 M parameters; a smoke run
SEQUENCES = 4
WARM_UP = 3
Interval = tuple[float, float]


def main() -> None:
    output, task = Path(sys.argv[1]), json.loads(sys.argv[2])
    bench = Bench(task["device"], TINY if task["small"] else LARGE)
    result = bench.measure(task["names"], task["rounds"])
    if dist.get_rank() == 0:
        output.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


class Bench:
    """Everything on one device: the CPU with gloo, or a GPU with NCCL."""

    def __init__(self, device: str, size: Size) -> None:
        self.size, self.device = size, torch.device(device)
        if device == "cuda":
            self.device = torch.device(device, int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
            torch.set_float32_matmul_precision("high")
        backends = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backends, timeout=timedelta(minutes=10))
        self.template: GPT = make_gpt(size).to(self.device)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def measure(self, names: list[str], rounds: int) -> dict[str, Any]:
        peaks, hidden, failures = {}, {}, {}
        for name in names:  # alone, so that the memory is its own
            found = attempt(lambda name=name: self._alone(name))
            if isinstance(found, str):
                failures[name] = found
            else:
                peaks[name], hidden[name] = found
        times = self._times([name for name in names if name not in failures], rounds)
        parameters = sum(param.numel() for param in self.template.parameters())
        return {
            "machine": machine_text(),
            "parameters": parameters,
            "tokens": SEQUENCES * self.size.context,
            "peaks": peaks,
            "hidden": hidden,
            "failures": failures,
            "times": times,
        }

    def _batch(self, number: int) -> tuple[Tensor, Tensor]:
        tokens, targets = make_batch(dist.get_rank(), number, SEQUENCES, self.size)
        return tokens.to(self.device), targets.to(self.device)

    def _warm(self, name: str) -> Contestant:
        contestant = make(name, self.template)
        for number in range(WARM_UP):
            contestant.iterate(self._batch(number))
        return contestant

    def _alone(self, name: str) -> tuple[int | None, float | None]:
        """Peak bytes, the most on any rank, and which share of the communication is hidden."""
        before = torch.cuda.memory_allocated() if self.is_cuda else 0  # what is there for all of them
        contestant = self._warm(name)
        if not self.is_cuda:
            return None, None
        torch.cuda.reset_peak_memory_stats()
        contestant.iterate(self._batch(WARM_UP))
        torch.cuda.synchronize()
        peak = torch.tensor([torch.cuda.max_memory_allocated() - before], device=self.device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for number in range(3):
                contestant.iterate(self._batch(number))
            torch.cuda.synchronize()
        kernels = [event for event in profiler.events() or () if "cuda" in str(event.device_type).lower()]
        spans = [(_is_communication(event.name), (event.time_range.start, event.time_range.end)) for event in kernels]
        share = hidden_share(
            [span for is_comm, span in spans if is_comm], [span for is_comm, span in spans if not is_comm]
        )
        del contestant
        gc.collect()
        torch.cuda.empty_cache()
        return int(peak), share

    def _times(self, names: list[str], rounds: int) -> dict[str, list[float]]:
        """Every contestant once per round, in another order every time. Milliseconds, the slowest rank's."""
        contestants = {name: self._warm(name) for name in names}
        times: dict[str, list[float]] = {name: [] for name in names}
        order = random.Random(0)  # the same on every rank
        for number in range(rounds):
            for name in order.sample(names, len(names)):
                batch = self._batch(number)
                self._synchronize()
                start = time.perf_counter()
                contestants[name].iterate(batch)
                self._synchronize()
                times[name].append((time.perf_counter() - start) * 1e3)
        return times

    def _synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(1))  # through gloo: on the CPU in both cases


def machine_text() -> str:
    """The GPUs, and what drives them."""
    if not torch.cuda.is_available():
        return f"no GPU, {os.cpu_count()} cores, torch {torch.__version__}, gloo"
    gpus = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return (
        f"{torch.cuda.device_count()} x {', '.join(gpus)}, driver {_driver()}, CUDA {torch.version.cuda}, "
        f"torch {torch.__version__}, NCCL {nccl}"
    )


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    return path.read_text().splitlines()[0].split("Module")[-1].split()[0] if path.exists() else "unknown"


def _is_communication(kernel: str) -> bool:
    return kernel.lower().startswith("nccl")


def hidden_share(communication: Iterable[Interval], computation: Iterable[Interval]) -> float | None:
    """How much of the time in which something is sent something is computed as well; None if nothing is sent."""
    sent, computed = _joined(communication), _joined(computation)
    total = sum(end - start for start, end in sent)
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in sent for b in computed)
    return both / total if total else None


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time without overlaps, in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


if __name__ == "__main__":
    main()

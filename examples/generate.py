"""Load the newest checkpoint of train_gpt.py or zero2.py into one process, without torchrun, and write some text.

    python examples/generate.py --prompt "def "

A checkpoint is a directory of torch.distributed.checkpoint (DCP), whoever and however many wrote it. Only the model is
read, not the optimizer's state. The reader and planner of shardstep check what they read and run no code from it.
"""

from __future__ import annotations

import sys
import warnings
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from byte_gpt import byte_gpt
from shardstep import checkpoint


def newest_in(folder: Path) -> Path:
    """The newest checkpoint of all runs that were saved under a folder."""
    runs = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    found = [path for run in (folder, *runs) if (path := checkpoint.latest(run))]
    if not found:
        print(f"no checkpoint in {folder}; train_gpt.py makes some", file=sys.stderr)
        sys.exit(2)
    return max(found, key=lambda path: path.stat().st_mtime)


def read_into(form: dict[str, Any], path: Path) -> dict[str, Any]:
    """Read those entries of a checkpoint that ``form`` has, into its tensors and in place of its other values."""
    warnings.filterwarnings("ignore", ".*assuming the intent is to load in a single process")  # it is
    dcp.load(form, storage_reader=checkpoint.Reader(path), planner=checkpoint.SafeLoadPlanner())
    return form


@torch.no_grad()
def continued(model: nn.Module, prompt: str, length: int, context: int, temperature: float, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    text = list(b"\n\n" + prompt.encode())  # the blank lines put the prompt at the start of a line, as code has it
    for _ in range(length):
        logits = model(torch.tensor([text[-context:]]))[0, -1]
        text.append(int(torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)))
    return bytes(text[2:]).decode(errors="replace").rstrip()


def main() -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), help="where the training saved")
    parser.add_argument("--prompt", default="def ", help="start of the text")
    parser.add_argument("--length", type=int, default=400, help="bytes to add to it")
    parser.add_argument("--temperature", type=float, default=0.8, help="lower is safer, higher is wilder")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    path = newest_in(args.checkpoints)
    # What the training saved as ``extra`` says which model it is.
    extra = read_into({"extra": {"step": None, "sizes": None}}, path)["extra"]
    context = extra["sizes"].pop("context")
    model = byte_gpt(**extra["sizes"])
    read_into({"model": model.state_dict()}, path)
    print(f"{path}, step {extra['step']}:\n")
    print(continued(model, args.prompt, args.length, context, args.temperature, args.seed))


if __name__ == "__main__":
    main()

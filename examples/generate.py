"""Load the newest checkpoint of train_gpt.py or zero2.py into one process, without torchrun, and write some text.

    python examples/generate.py --prompt "def "

However many ranks wrote it. Only the model is read, not the optimizer's state.
"""

from __future__ import annotations

import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from pathlib import Path

import torch
from torch import nn

from byte_gpt import byte_gpt
from shardstep import checkpoint


def newest_in(folder: Path) -> Path:
    """The newest checkpoint in a folder, or of all runs in it."""
    found = [path] if (path := checkpoint.latest(folder)) else []
    if not found and folder.is_dir():
        found = [path for run in folder.iterdir() if run.is_dir() and (path := checkpoint.latest(run))]
    if not found:
        print(f"no checkpoint in {folder}; train_gpt.py makes some", file=sys.stderr)
        sys.exit(2)
    return max(found, key=lambda path: path.stat().st_mtime)


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
    extra = checkpoint.load_extra(path)  # where the training has written which model it is
    context = extra["sizes"].pop("context")
    model = byte_gpt(**extra["sizes"])
    checkpoint.load_model(path, model)
    print(f"{path}, step {extra['step']}:\n")
    print(continued(model, args.prompt, args.length, context, args.temperature, args.seed))


if __name__ == "__main__":
    main()

"""The training of train_gpt.py with sharded gradients (ZeRO-2): no DDP, each rank keeps 1/N of gradients and state.

    torchrun --standalone --nproc-per-node 2 examples/zero2.py

Prints the loss on the way, and at the end what every rank holds. Saves every 100 steps; started again it goes on from
there, with any number of ranks.
"""

from argparse import ArgumentParser

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from byte_gpt import byte_gpt, held_out_loss, load_text, mean_loss, pick_device, training_batch, warmup_cosine
from shardstep import ZeroRedundancyOptimizer, checkpoint

parser = ArgumentParser(description=__doc__)
for name, default in {"steps": 600, "batch-size": 16, "context": 128, "width": 192, "layers": 4, "heads": 6}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--checkpoints", default="checkpoints/zero2", help="(default: %(default)s)")
args = parser.parse_args()
device = pick_device()
dist.init_process_group(dist.get_default_backend_for_device(device))
rank, ranks = dist.get_rank(), dist.get_world_size()
say = print if rank == 0 else lambda text: None

text, held_out = load_text()
torch.manual_seed(0)
model = byte_gpt(args.width, args.layers, args.heads).to(device)  # not wrapped: the optimizer reduces the gradients
matrices = [param for param in model.parameters() if param.dim() >= 2]
vectors = [param for param in model.parameters() if param.dim() < 2]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=3e-3, betas=(0.9, 0.95), shard_gradients=True)
schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, args.steps))
found = checkpoint.resume(args.checkpoints, optimizer, model)
first = found[1]["step"] if found else 0
if found:
    schedule.load_state_dict(found[1]["schedule"])
    say(f"resumed from {found[0]}")

sizes = {"width": args.width, "layers": args.layers, "heads": args.heads, "context": args.context}
for step in range(first, args.steps):
    rows = training_batch(text, step, args.batch_size, args.context, 0, device)
    optimizer.zero_grad()
    loss = mean_loss(model, rows)
    (loss * len(rows) * ranks / args.batch_size).backward()  # gradients are reduced meanwhile, and freed
    optimizer.clip_grad_norm_(1.0)  # the norm over all ranks
    optimizer.step()
    schedule.step()
    if (done := step + 1) % 100 == 0 or done == args.steps:
        say(f"step {done:5}/{args.steps}  loss {loss.item():.3f}")
        extra = {"step": done, "schedule": schedule.state_dict(), "sizes": sizes}
        checkpoint.save(f"{args.checkpoints}/step-{done:06}", optimizer, model, extra=extra, keep=2)

say(f"held-out loss after training:  {held_out_loss(model, held_out, args.context, device):.3f} nats per byte")
held = optimizer.memory()  # in one write, so that ranks do not mix
print(f"rank {rank} holds {held.gradients / held.parameters:.3f} of the gradients: {held}\n", end="")
dist.barrier()
dist.destroy_process_group()

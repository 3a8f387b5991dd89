"""One thread per process: tests run in parallel already, and results do not depend on how threads cut a tensor."""

import torch

torch.set_num_threads(1)

"""What the server of ranks does once, before it forks ranks: imports, and a first compilation."""

import gc

import torch

from autofuse import backend
from tests.passes import dense, experts, harness, recommendation
from tests.robustness import seven

__all__ = ["backend", "dense", "experts", "recommendation", "seven"]

torch.set_num_threads(1)  # a pool of threads would not survive the fork
for how in (harness.passes_only(), "inductor"):  # the latter finds out what the C++ compiler can do
    torch.compile(lambda x: x @ x + 1, backend=how)(torch.ones(2, 2, requires_grad=True))
    torch._dynamo.reset()
gc.freeze()  # ranks share these pages, and never look for garbage there

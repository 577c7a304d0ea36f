"""What a fork server does first, so that the ranks it forks need not: imports, and Inductor's patterns."""

import torch

from autofuse import backend
from tests.passes import dense, experts, harness, recommendation
from tests.robustness import seven

__all__ = ["backend", "dense", "experts", "recommendation", "seven"]

torch.set_num_threads(1)  # a pool of threads would not survive the fork
with torch.no_grad():
    torch.compile(lambda x: x @ x + 1, backend=harness.passes_only())(torch.zeros(2, 2))
torch._dynamo.reset()

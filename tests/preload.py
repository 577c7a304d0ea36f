"""What the server of ranks does once, before it forks ranks: imports, and Inductor's patterns."""

import torch

from autofuse import backend
from tests.passes import dense, experts, harness, recommendation
from tests.robustness import seven

__all__ = ["backend", "dense", "experts", "recommendation", "seven"]

torch.set_num_threads(1)  # a pool of threads would not survive the fork
for grad in (False, True):
    x = torch.ones(2, 2, requires_grad=grad)
    with torch.set_grad_enabled(grad):
        torch.compile(lambda x: x @ x + 1, backend=harness.passes_only())(x)
    torch._dynamo.reset()

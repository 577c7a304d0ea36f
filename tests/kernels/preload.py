"""What the server of interpreting ranks does once, before it forks ranks: imports."""

import gc

import torch

from . import backward_calls, calls, embedding_calls, update_calls

__all__ = ["backward_calls", "calls", "embedding_calls", "update_calls"]

torch.set_num_threads(1)  # a pool of threads would not survive the fork
gc.freeze()  # ranks share these pages, and never look for garbage there

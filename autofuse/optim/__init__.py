"""Optimizers for data parallel training whose step exchanges the gradients: `autofuse.optim.AdamW(params)`.

They stand in place of DDP and a `torch.optim.Optimizer`: gradients are averaged over the ranks of a group,
every rank updates the elements that it owns, and all ranks get the new parameters, in one op. A rank holds
the state of its elements only, `1/W` of the whole.
"""

from autofuse.optim.optimizers import LAMB, SGD, Adam, AdamW

__all__ = ["LAMB", "SGD", "Adam", "AdamW"]

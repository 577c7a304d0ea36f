"""How tests on GPUs say what is wrong: on which rank, in which way, and where first."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tests.gpu.expected import group_of_all


def first_wrong(found: Tensor, wanted: Tensor, off: Tensor) -> str:
    """How many elements are off, where the first one is, and what is there."""
    where = off.nonzero()
    at = tuple(where[0].tolist())
    return (
        f"{len(where)} of {off.numel()}, first {list(at)}: {float(found[at]):g} instead of "
        f"{float(wanted[at]):g}, last {where[-1].tolist()}"
    )


def complaints(found: Sequence[str | Mapping[str, str]]) -> str:
    """What ranks have said is wrong, of each way or of all, a line each; empty if nothing is."""
    said = [of_rank if isinstance(of_rank, Mapping) else {"": of_rank} for of_rank in found]
    return "\n".join(
        f"rank {rank} {way}: {wrong}"
        for rank, ways in enumerate(said)
        for way, wrong in ways.items()
        if wrong
    )


@contextmanager
def about(what: str) -> Iterator[None]:
    """Errors say what it was; among them that a kernel gave up waiting."""
    import autofuse

    try:
        yield
        torch.cuda.synchronize()
        autofuse.check(group_of_all())
    except Exception as error:
        raise RuntimeError(f"{what}: {error}") from error

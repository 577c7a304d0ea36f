"""What commands on the GPUs of torchrun share: their group, and the sizes of a layer."""

from collections.abc import Iterator
from contextlib import contextmanager

OPS = ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul", "matmul_all_gather")


def layer(size: str) -> tuple[int, int]:
    """K and N of a whole layer, from `K,N`. ValueError for anything else."""
    parts = size.split(",")
    if len(parts) != 2 or not all(part.strip().isdigit() and int(part) for part in parts):
        raise ValueError(f"--size: expected K,N such as 8192,8192, got {size!r}")
    k, n = map(int, parts)
    return k, n


def extents(op: str, tokens: int, size: str, world: int) -> tuple[int, int, int]:
    """(M, K, N) of the matmul on each rank, from the extents of the whole layer.

    A reduction multiplies `[M, K / W] @ [K / W, N]`; a gather, which stands before the other layer of
    the pair, `[M, N] @ [N, K / W]`; matmul_all_gather, which ends a model, `[M, K] @ [K, N / W]`. Raises
    ValueError for extents that do not divide by `world`.
    """
    k, n = layer(size)
    publishes = op == "matmul_all_gather"
    if (n if publishes else k) % world:
        which = "second" if publishes else "first"
        raise ValueError(f"--size {size}: expected positive extents, the {which} a multiple of {world} ranks")
    if publishes and tokens > 0:
        return tokens, k, n // world
    if tokens < 1 or (op != "matmul_all_reduce" and tokens % world):
        raise ValueError(f"--tokens {tokens}: expected a positive multiple of {world} ranks")
    return (tokens, n, k // world) if op == "all_gather_matmul" else (tokens, k // world, n)


@contextmanager
def gpu_ranks(command: str) -> Iterator[tuple[int, int]]:
    """Rank and size of the group of all ranks that torchrun has started, a GPU each. ValueError if none."""
    import torch.distributed as dist

    from autofuse.torchrun import join

    join(command)
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()

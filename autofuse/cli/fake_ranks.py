"""One process as a rank of many: the environment of a launcher, and process groups that exchange nothing."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

from autofuse.lowering import torch_internals


@contextmanager
def fake_ranks(rank: int, world: int, ranks_per_host: int | None = None) -> Iterator[None]:
    """Inside, this process is `rank` of `world`, as torchrun would have started it.

    Every process group that is made inside is fake, whatever backend is asked for. If a script starts its
    ranks itself, by `torch.multiprocessing.spawn`, one of them runs here. A `world_size` that the script
    passes itself wins over `world`. Raises ValueError for a rank out of range.
    """
    environment = _launched(rank, world, ranks_per_host)
    before = dict(os.environ)
    os.environ.update(environment)
    undo = [
        _replace(dist.init_process_group, _fake_init(rank, world, ranks_per_host)),
        _replace(dist.new_group, _fake_new_group()),
        _replace(torch.multiprocessing.spawn, _run_one(rank)),
    ]
    try:
        yield
    finally:
        for each in undo:
            each()
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


def _launched(rank: int, world: int, ranks_per_host: int | None) -> dict[str, str]:
    """What torchrun sets."""
    local = world if ranks_per_host is None else ranks_per_host
    if world < 1 or local < 1:
        raise ValueError(f"expected at least one rank, got a world of {world} and {local} ranks a host")
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is outside of a world of {world}: expected 0 to {world - 1}")
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(min(local, world)),
        "GROUP_RANK": str(rank // local),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "autofuse",
    }


def _fake_init(default_rank: int, default_world: int, ranks_per_host: int | None) -> Callable[..., None]:
    real = dist.init_process_group

    def init_process_group(
        backend: Any = None,
        init_method: Any = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        **kwargs: Any,
    ) -> None:
        world = world_size if world_size > 0 else default_world
        chosen = rank if rank >= 0 else min(default_rank, world - 1)
        os.environ.update(_launched(chosen, world, ranks_per_host))
        real("fake", store=torch_internals.fake_store(), rank=chosen, world_size=world)

    return init_process_group


def _fake_new_group() -> Callable[..., Any]:
    real = dist.new_group

    def new_group(ranks: Any = None, *args: Any, group_desc: str | None = None, **kwargs: Any) -> Any:
        # All other arguments belong to a backend, or to how ranks find each other.
        return real(ranks, group_desc=group_desc)

    return new_group


def _run_one(rank: int) -> Callable[..., None]:
    def spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, **kwargs: Any) -> None:
        fn(min(rank, nprocs - 1), *args)

    return spawn


def _replace(function: Any, replacement: Any) -> Callable[[], None]:
    """Puts `replacement` wherever a module has `function` under its name; returns a function that undoes
    it."""
    name = function.__name__
    places = [m for m in list(sys.modules.values()) if getattr(m, "__dict__", {}).get(name) is function]
    for module in places:
        setattr(module, name, replacement)

    def undo() -> None:
        for module in places:
            setattr(module, name, function)

    return undo

"""Custom ops that communicate, with group names of their own, as inference engines define them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

import autofuse

LIBRARY = torch.library.Library("engine", "DEF")

calls: list[str] = []
"""Names of the ops that have run."""


def group(name: str) -> dist.ProcessGroup:
    """The engine's own registry of groups."""
    groups = {"tp:0": dist.group.WORLD}
    found = groups[name]
    assert found is not None
    return found


def _all_reduce(x: Tensor, group_name: str) -> Tensor:
    calls.append("all_reduce")
    out = x.clone()
    dist.all_reduce(out, group=group(group_name))
    return out


def _reduce_scatter(x: Tensor, dim: int, world_size: int, group_name: str) -> Tensor:
    calls.append("reduce_scatter")
    moved = x.movedim(dim, 0).contiguous()
    out = moved.new_empty(moved.shape[0] // world_size, *moved.shape[1:])
    dist.reduce_scatter_tensor(out, moved, group=group(group_name))
    return out.movedim(0, dim).contiguous()


def _all_gather(x: Tensor, dim: int, world_size: int, group_name: str) -> Tensor:
    calls.append("all_gather")
    moved = x.movedim(dim, 0).contiguous()
    out = moved.new_empty(world_size * moved.shape[0], *moved.shape[1:])
    dist.all_gather_into_tensor(out, moved, group=group(group_name))
    return out.movedim(0, dim).contiguous()


def _all_to_all(
    x: Tensor, group_name: str, out_sizes: list[int] | None, in_sizes: list[int] | None
) -> Tensor:
    calls.append("all_to_all")
    out = x.new_empty(sum(out_sizes) if out_sizes else x.shape[0], *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), out_sizes, in_sizes, group=group(group_name))
    return out


def _resized(x: Tensor, dim: int, size: int | torch.SymInt) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


LIBRARY.define("all_reduce(Tensor x, str group_name, float scale=1.0) -> Tensor")
LIBRARY.define("reduce_scatter(Tensor x, int dim, int world_size, str group_name) -> Tensor")
LIBRARY.define("all_gather(Tensor x, int dim, int world_size, str group_name) -> Tensor")
LIBRARY.define(
    "all_to_all(Tensor x, str group_name, SymInt[]? out_sizes=None, SymInt[]? in_sizes=None) -> Tensor"
)
LIBRARY.define("scale_(Tensor(a!) x, str group_name) -> Tensor(a!)")
LIBRARY.define("two(Tensor x, str group_name) -> (Tensor, Tensor)")
LIBRARY.define("quantised(Tensor x, Tensor scale, str group_name) -> Tensor")
LIBRARY.define("nameless(Tensor x) -> Tensor")
for name, impl in {
    "all_reduce": lambda x, group_name, scale=1.0: _all_reduce(x, group_name) * scale,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": lambda x, group_name, out=None, in_=None: _all_to_all(x, group_name, out, in_),
}.items():
    LIBRARY.impl(name, impl, "CPU")
for name, fake in {
    "all_reduce": lambda x, group_name, scale=1.0: torch.empty_like(x),
    "reduce_scatter": lambda x, dim, world, group_name: _resized(x, dim, x.shape[dim] // world),
    "all_gather": lambda x, dim, world, group_name: _resized(x, dim, x.shape[dim] * world),
    "all_to_all": lambda x, group_name, out=None, in_=None: _resized(x, 0, sum(out) if out else x.shape[0]),
}.items():
    torch.library.register_fake(f"engine::{name}", fake, lib=LIBRARY)

engine = torch.ops.engine


def register() -> None:
    for kind in ("all_reduce", "reduce_scatter", "all_gather"):
        autofuse.register_collective(f"engine::{kind}", kind, group=group)
    autofuse.register_collective(
        "engine::all_to_all",
        "all_to_all",
        group=group,
        arguments={"output_splits": "out_sizes", "input_splits": "in_sizes"},
    )

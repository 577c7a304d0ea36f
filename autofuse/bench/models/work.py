"""A cell of `bench models`: a function to compile, a step that calls it, and the exact results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autofuse.bench.models.rows import CEILING, DECLARED, OURS

Forward: TypeAlias = Callable[..., Any]

FIRST, LAST = ("eager", "inductor"), (OURS, CEILING)


@dataclass(frozen=True)
class Work:
    """forward: the function that variants compile. step: runs one step with a compiled forward, and returns
    the results of this rank that are compared. exact: the same results in a wider dtype. declare: tells
    autofuse which values are the same on all ranks."""

    forward: Forward
    step: Callable[[Forward], Sequence[Tensor]]
    exact: Callable[[], Sequence[Tensor]]
    declare: Callable[[], None] | None = None


@dataclass(frozen=True)
class Cell:
    """others: variants beside those of every cell; captured: the step is timed in CUDA graphs, too; declares:
    some values are the same on all ranks, which a variant behind the others declares."""

    name: str
    make: Callable[[torch.device], Work]
    others: tuple[str, ...] = ()
    captured: bool = False
    declares: bool = False

    @property
    def variants(self) -> tuple[str, ...]:
        return (*FIRST, *self.others, *LAST, *([DECLARED] if self.declares else []))


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def wider(dtype: torch.dtype) -> torch.dtype:
    """In which a reference is computed."""
    return torch.float64 if dtype == torch.float32 else torch.float32


def world_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def local(x: Any) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    part: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return part.wait() if hasattr(part, "wait") else part


def gradients(model: nn.Module) -> list[Tensor]:
    """Of all parameters that have one; of a DTensor the local part."""
    return [local(p.grad) for p in model.parameters() if p.grad is not None]


def training_work(
    model: nn.Module,
    inputs: Sequence[Any],
    target: Tensor,
    exact: Callable[[], tuple[nn.Module, Sequence[Any]]],
    declare: Callable[[], None] | None = None,
) -> Work:
    """Forward and backward of `mean(y * target)`, without an optimizer. exact: a model in a wider dtype, and
    its inputs."""

    def step_of(model: nn.Module, call: Forward, inputs: Sequence[Any]) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        y = local(call(*inputs))
        (y * target).mean().backward()
        return [y.detach(), *gradients(model)]

    def reference() -> list[Tensor]:
        wide, wide_inputs = exact()
        return step_of(wide, wide, wide_inputs)

    return Work(model, lambda call: step_of(model, call, inputs), reference, declare)


def serving_work(
    model: nn.Module,
    inputs: Sequence[Any],
    exact: Callable[[], Sequence[Tensor]],
    declare: Callable[[], None] | None = None,
) -> Work:
    """The forward, without gradients."""

    def step(call: Forward) -> list[Tensor]:
        with torch.no_grad():
            return [local(call(*inputs))]

    def reference() -> Sequence[Tensor]:
        with torch.no_grad():
            return exact()

    return Work(model, step, reference, declare)

"""all_reduce_update as a problem: its ways on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from autofuse.lowering.gpu.choice.kernel import Kernel, Launch, Way, only_kernels
from autofuse.lowering.gpu.choice.work import Rows, Start, Work
from autofuse.lowering.gpu.dense.work import INDUCTOR_TAIL, collective_work, tail_work
from autofuse.lowering.ops.all_reduce_update import MOST_BUCKETS, OP
from autofuse.lowering.update_rules import RULES
from autofuse.native_kernels.triton.update_launch import KINDS
from autofuse.native_kernels.triton.update_parts import LENGTH
from autofuse.native_kernels.triton.whole_update_packets import (
    WholePacketsConfig,
    launch_whole_update_packets,
    whole_packets_needs,
)

from .ways import TORCH_NCCL, OfElements

DTYPES = tuple(KINDS)
"""Dtypes that gradients and parameters may have."""


@dataclass(frozen=True)
class WholeUpdateProblem(OfElements):
    """A call. elements: of all tensors; buckets: of these elements; dtypes: of gradients, and of parameters;
    programs: multiprocessors. The time depends little on which sums are kept."""

    elements: int
    buckets: int
    tensors: int
    rule: str
    dtypes: tuple[torch.dtype, torch.dtype]
    world: int
    programs: int = 132
    op: str = OP

    @property
    def n(self) -> int:
        """Bytes of gradient, parameter and states of an element."""
        return sum(dtype.itemsize for dtype in self.dtypes) + 4 * len(RULES[self.rule].states)

    def library_ways(self) -> Sequence[Way]:
        return (Way(TORCH_NCCL, _torch_works, replaced=True),)

    def kernels(self) -> Sequence[Kernel[WholeUpdateProblem, Any]]:
        takes = 0 < self.buckets <= MOST_BUCKETS and self.world <= 8 and {*self.dtypes} <= {*DTYPES}
        return (PACKETS,) if takes and not RULES[self.rule].by_norms else ()

    def at(self, op: str, m: int, k: int, n: int, world: int) -> WholeUpdateProblem:
        return replace(self, elements=m, buckets=-(-m // LENGTH.value), tensors=1, world=world)

    @property
    def measured_as(self) -> str:
        return f"{self.op} {self.rule}"


@dataclass(frozen=True)
class Packets(Rows):
    """One exchange of packets and nothing else to wait for: a fit begins with what small sums take."""

    CONSTANTS: ClassVar[Start] = {**Rows.CONSTANTS, "start_us": (8.0, 0.5), "link": (0.9, 0.3)}


def _touched(p: WholeUpdateProblem) -> float:
    """Bytes that are read or written: gradients, and parameters and states before and after."""
    grad, param = (dtype.itemsize for dtype in p.dtypes)
    return p.elements * (grad + 2 * param + 8 * len(RULES[p.rule].states))


def _reduced(p: WholeUpdateProblem, collectives: int) -> list[Work]:
    """all_reduces of NCCL that share out the gradients."""
    nbytes = p.elements * p.dtypes[0].itemsize
    return [collective_work("all_reduce", nbytes / collectives, p.world)] * collectives


def _torch_works(p: WholeUpdateProblem) -> Sequence[Work]:
    """As the op's reference has it: tensor by tensor, in kernels of torch."""
    each = p.tensors
    return (*_reduced(p, each), Rows(f"{p.op} torch", 3 * _touched(p), 0.0, together=False, starts=each))


def kept_works(p: WholeUpdateProblem, collectives: int) -> Sequence[Work]:
    """What Inductor makes of a graph that keeps its all_reduces: a kernel a tensor, beside the next
    all_reduce. So those behind the last one count."""
    kernels = max(1, p.tensors // collectives)
    return *_reduced(p, collectives), *[tail_work(_touched(p) / p.tensors, INDUCTOR_TAIL)] * kernels


def numbers_work() -> Work:
    """The kernel of Inductor that makes the numbers of a fused op of a graph."""
    return tail_work(0.0, INDUCTOR_TAIL)


def _packets_work(config: WholePacketsConfig, p: WholeUpdateProblem) -> Work:
    sent = whole_packets_needs(p.buckets, p.dtypes[0].itemsize, 1).packets / 2 * (p.world - 1)
    grads = p.elements * p.dtypes[0].itemsize  # read to be sent, and again to be added
    return Packets(f"{p.op} packets", _touched(p) + grads + 2 * sent, sent, together=False)


def _launch_packets(
    at: Launch, config: WholePacketsConfig, words: Tensor, buckets: Tensor, rates: Tensor, count: int,
    dtypes: tuple[torch.dtype, torch.dtype], unit: int, rule: int, mean: bool,
) -> None:  # fmt: skip
    launch_whole_update_packets(
        at.memory, words, buckets, rates, count, dtypes, unit, rule, mean, config, at.site, at.compile_only
    )


PACKETS: Kernel[WholeUpdateProblem, WholePacketsConfig] = Kernel(
    "whole_packets",
    lambda problem: (WholePacketsConfig(), WholePacketsConfig(warps=16)),
    needs=lambda config, problem: whole_packets_needs(
        problem.buckets, problem.dtypes[0].itemsize, problem.world
    ),
    launch=_launch_packets,
    only_launches=only_kernels,
    work=_packets_work,
    source="triton/whole_update_packets.py",
)

"""The kernels of matmul_all_gather: `launch(at, config, x, w, out, bias, dim, outer)`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from autofuse.lowering.gpu.choice.kernel import Kernel, Launch, only_kernels
from autofuse.native_kernels.triton.matmul_gather import PublishConfig, launch_matmul_gather, publish_needs
from autofuse.native_kernels.triton.matmul_gather_packets import (
    MOST_ROWS,
    PublishPacketsConfig,
    launch_matmul_gather_packets,
    publish_packets_needs,
)

from .work import publish_packets_work, publish_work

if TYPE_CHECKING:
    from .ways import DenseProblem


def _packets_configs(problem: DenseProblem) -> Iterator[PublishPacketsConfig]:
    if problem.m > MOST_ROWS:
        return
    if problem.m <= 32:
        yield PublishPacketsConfig()
        yield PublishPacketsConfig(bk=256, stages=4)
        if problem.n >= 128 * problem.programs // 2:
            yield PublishPacketsConfig(bn=128)
    else:
        yield PublishPacketsConfig(bk=64, warps=8)
        yield PublishPacketsConfig(bn=128, bk=64, warps=8)


def _launch_packets(
    at: Launch, config: PublishPacketsConfig, x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None,
    dim: int, outer: int,
) -> None:  # fmt: skip
    launch_matmul_gather_packets(
        at.memory, x, w, out, dim, outer, config, at.site, at.trace, at.compile_only, bias
    )


PACKETS: Kernel[DenseProblem, PublishPacketsConfig] = Kernel(
    "packets",
    _packets_configs,
    needs=lambda config, p: publish_packets_needs(p.m, p.n, p.world, config),
    launch=_launch_packets,
    only_launches=only_kernels,
    work=publish_packets_work,
    source="triton/matmul_gather_packets.py",
)


def _tiles_configs(problem: DenseProblem) -> Iterator[PublishConfig]:
    """Programs that only communicate copy what has arrived while the others multiply."""
    if 16 <= problem.m <= 512:
        yield PublishConfig(bm=64, bn=128, warps=4, stages=6)
        yield PublishConfig(bm=64, bn=128, warps=4, stages=6, communicating=8)
    if problem.m > 64:
        yield PublishConfig(bn=128, stages=5)
        yield PublishConfig()
        yield PublishConfig(communicating=8)
    if problem.m > 512:
        yield PublishConfig(communicating=16)


def _launch_tiles(
    at: Launch, config: PublishConfig, x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, dim: int,
    outer: int,
) -> None:  # fmt: skip
    launch_matmul_gather(at.memory, x, w, out, dim, outer, config, at.site, at.trace, at.compile_only, bias)


TILES: Kernel[DenseProblem, PublishConfig] = Kernel(
    "tiles",
    _tiles_configs,
    needs=lambda config, p: publish_needs(p.m, p.n, p.outer, 2, p.world, config),
    launch=_launch_tiles,
    only_launches=only_kernels,
    work=publish_work,
    source="triton/matmul_gather.py",
)

PUBLISHES: tuple[Kernel[DenseProblem, Any], ...] = (PACKETS, TILES)

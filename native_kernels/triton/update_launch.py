"""How the kernels of optimizers are launched: their configuration, memory and pieces."""

from dataclasses import dataclass

import torch
from torch import Tensor

from autofuse.native_kernels.gpu.memory import Need, PeerMemory

KINDS = {torch.float32: 4, torch.bfloat16: 1, torch.float16: 2}
"""Codes of dtypes."""

NUMBERS_OF_A_RANK = 4
"""Sums of squares in float64 that a rank tells its peers, at most: two of each end of its run, by LAMB."""


@dataclass(frozen=True)
class UpdateConfig:
    """ahead: items that a rank sends before it sums their like; piece: most buckets
    of a launch."""

    ahead: int = 1024
    warps: int = 4
    per_sm: int = 4
    piece: int = 1 << 16

    @property
    def registers(self) -> int:
        """Of a thread, such that all programs fit."""
        return min(255, 65536 // (32 * self.warps * self.per_sm) // 8 * 8)

    def run(self, world: int) -> int:
        """Most buckets of a run in a launch."""
        return max(1, self.piece // world)

    def pieces(self, most: int, world: int) -> list[tuple[int, int]]:
        """Of every launch of a step: the first bucket of each run, and how many follow. most: buckets of the
        longest run."""
        run, most = self.run(world), max(most, 1)
        return [(first, min(run, most - first)) for first in range(0, most, run)]


def update_needs(config: UpdateConfig, most: int, grad_size: int, param_size: int, world: int) -> Need:
    """The memory of a call. most: buckets of its longest run. For norms a rank stores sums of squares to
    `finished` of all ranks, and signals; counters tell when its own sums are whole."""
    most = min(most, config.run(world))
    elements = world * most * 1024
    return Need(
        words=2 * elements * (grad_size + param_size),
        finished=2 * 8 * NUMBERS_OF_A_RANK * world,
        signals=2 * 4 * world,
        done=2,
    )


@dataclass(frozen=True)
class StepLaunch:
    """What the launches of a step have in common.

    words, buckets: as the kernels have them, on the device; most: buckets of the longest run; dtypes: of
    gradients and of parameters; unit: 4, or less, that divides all lengths.
    """

    memory: PeerMemory
    words: Tensor
    buckets: Tensor
    most: int
    dtypes: tuple[torch.dtype, torch.dtype]
    unit: int
    config: UpdateConfig
    site: int
    compile_only: bool

    @property
    def programs(self) -> int:
        return self.memory.programs * self.config.per_sm

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """As `UpdateConfig.pieces` has them."""
        return self.config.pieces(self.most, self.memory.world)

    def sending(self) -> dict[str, int]:
        """Constants of kernels that send gradients: one program of a multiprocessor sends, where the others
        sum, so that links and memory work at once. Of more than two ranks each sends more than it sums."""
        senders = self.memory.programs * (1 if self.memory.world == 2 else 2)
        return {"SENDERS": min(senders, self.programs), "AHEAD": self.config.ahead}

    def settings(self) -> dict[str, int]:
        """Constants of every kernel."""
        config = self.config
        return {
            "PROGRAMS": self.programs, "PER_SM": config.per_sm, "W": self.memory.world, "UNIT": self.unit,
            "num_warps": config.warps, "num_stages": 1, "maxnreg": config.registers,
        }  # fmt: skip

"""Runs all_reduce_update on CPU ranks that share memory.

The plans and the memory are those of reduce_update_gather (`update_executor`), but an owner's outbox has sums
in place of new parameters, and whoever reads a tile of sums applies the rule to it.

A factor that depends on the norm of all sums, and norms of LAMB, are known behind all tiles. A rank keeps the
sums, or the directions of LAMB, until then; the second phase exchanges nothing. Squares of tiles are added in
the order of the elements, not in that of the tiles' arrival, so that all ranks have the same bits."""

from __future__ import annotations

import math
from contextlib import nullcontext
from ctypes import addressof, byref, c_double, c_float, c_void_p
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autofuse.lowering.buckets import Buckets
from autofuse.lowering.cpu.scratch import scratch
from autofuse.lowering.cpu.update_executor import Part, Recipe, moves, part_of, piece_shapes, recipe_of
from autofuse.lowering.cpu.workspace import Call, Workspace
from autofuse.lowering.cpu.workspaces import workspace_for
from autofuse.lowering.plan import Compute, Copy, Reduce, Tile
from autofuse.lowering.update_rules import NUMBERS, RULES, factor, trust
from autofuse.native_kernels.cpu import optimizer as kernels

if TYPE_CHECKING:
    from autofuse.lowering.ops.all_reduce_update import AllReduceUpdate

OP = "all_reduce_update"
WIDTH = 4  # bytes of an element of states and sums, and between those of gradients


def run_whole_update(args: AllReduceUpdate) -> tuple[Tensor, Tensor]:
    """The op. States are float32; gradients and parameters have any dtype of the kernels."""
    workspace, buckets = workspace_for(args.group_name), args.buckets
    given = f"{_named(tuple((g.shape, g.dtype) for g in args.grads))} {args.reduce_op}"
    two_phases = args.limits is not None or RULES[args.rule].by_norms
    with scratch(workspace, buckets.offsets[-1]) if two_phases else nullcontext() as kept:
        step = _Step(args, workspace, buckets, kept)
        for piece, shape in enumerate(piece_shapes(OP, args.order, buckets)):
            recipe = recipe_of(shape, workspace.rank)
            with workspace.call(OP, args.site, f"{given}, {recipe.agreement}", recipe.outbox.end) as call:
                step.piece(call, piece, recipe)
        return step.finish()


@lru_cache(maxsize=256)
def _named(grads: tuple[tuple[torch.Size, torch.dtype], ...]) -> str:
    return " ".join(f"{dtype} {tuple(shape)}" for shape, dtype in grads)


class _Step:
    """One call of the op: its tensors as kernels read them. kept: memory until a second phase."""

    def __init__(
        self, args: AllReduceUpdate, workspace: Workspace, buckets: Buckets, kept: Tensor | None
    ) -> None:
        self.args, self.buckets, self.kept = args, buckets, kept
        self.world, self.rank, count = workspace.world, workspace.rank, len(args.grads)
        self.given = [*args.params, *args.states]
        # Kernels read flat memory; sums come in the order of the elements of the parameters.
        self.flat = [t if t.is_contiguous() else t.detach().contiguous() for t in self.given]
        self.grads = [g.contiguous() for g in args.grads]
        self.numbers = args.every_row().float().contiguous()
        self.sums = args.room_for_sums()
        sizes = [g.numel() * keep for g, keep in zip(self.grads, args.keep_sums, strict=True)]
        parts = zip(self.sums.split(sizes), args.keep_sums, strict=True)
        self.to_sums = kernels.pointers([part if keep else None for part, keep in parts])
        params, states = self.flat[:count], self.flat[count:]
        self.states = [kernels.pointers(states[i : i + count]) for i in range(0, len(states), count)]
        self.params_of, self.grads_of = kernels.pointers(params), kernels.pointers(self.grads)
        self.of_params, self.of_grads = (kernels.dtypes([t.dtype for t in of]) for of in (params, self.grads))
        self.parts, self.trusts = (c_void_p * self.world)(), (c_float * count)()
        self.norms, self.squares = (c_double * (2 * count))(), (c_double * count)()
        self.of_tiles: dict[tuple[int, int], tuple[float, ...]] = {}
        """What tiles add to norms: by the tensor and the first element there."""
        self.mean = 1 / self.world if args.reduce_op == "avg" else 1.0
        self.work = kernels.Work(
            params_of=addressof(self.params_of), grads_of=addressof(self.grads_of),
            param_dtypes_of=addressof(self.of_params), grad_dtypes_of=addressof(self.of_grads),
            numbers_of=self.numbers.data_ptr(), row=NUMBERS, trust_of=addressof(self.trusts),
            norms_of=addressof(self.norms), parts=addressof(self.parts), part_width=WIDTH, out_width=WIDTH,
            rounds=True, world=self.world, rank=self.rank, rule=RULES[args.rule].code,
        )  # fmt: skip
        for i, state in enumerate(self.states):
            self.work.states_of[i] = addressof(state)

    def piece(self, call: Call, piece: int, recipe: Recipe) -> None:
        for action, tile, there in moves(call, recipe, self.world, self.rank, self.parts):
            part = part_of(self.buckets, piece, tile)
            match action:
                case Compute(dest=dest) if dest != self.rank:
                    kernels.copy_segments(
                        there,
                        WIDTH,
                        part.segments,
                        part.count,
                        self.grads_of,
                        self.of_grads,
                        self.grads_of,
                        True,
                    )
                case Reduce():
                    self._run(part, kernels.SUM, kept=there, scale=self.mean)
                    self._apply(tile, part, there)
                case Copy():
                    self._apply(tile, part, there)

    def _apply(self, tile: Tile, part: Part, sums: int) -> None:
        """What the first phase does with a tile of sums."""
        if self.kept is None:
            self._run(part, kernels.UPDATE, sums, first=True)
            return
        kept = self.kept.data_ptr() + WIDTH * (self.buckets.starts[tile.chunk] + part.at)
        if self.args.limits is not None:
            self.work.squares_of = addressof(self.squares)
            self._run(part, kernels.SUM, sums, kept, first=True)
            self.work.squares_of = None
            self._note(part, self.squares, 1)
        else:
            self._run(part, kernels.DIRECT, sums, kept, first=True)
            self._note(part, self.norms, 2)

    def _note(self, part: Part, found: Any, width: int) -> None:
        """Takes what a tile adds to norms away from the kernels: numbers of each of its tensors."""
        values = part.segments[: 4 * part.count]
        for tensor, start in zip(values[::4], values[1::4], strict=True):
            at = slice(width * tensor, width * (tensor + 1))
            self.of_tiles[tensor, start] = tuple(found[at])
            found[at] = [0.0] * width

    def _norms(self, width: int) -> list[list[float]]:
        """What all tiles have added to norms, for each tensor."""
        totals = [[0.0] * width for _ in self.grads]
        for (tensor, _), values in sorted(self.of_tiles.items()):
            for i, value in enumerate(values):
                totals[tensor][i] += value
        return totals

    def _run(
        self,
        part: Part,
        action: int,
        sums: int | None = None,
        kept: int | None = None,
        first: bool = False,
        scale: float = 1.0,
    ) -> None:
        """Adds up what ranks have sent, or takes sums. first: these have not been handed out."""
        work = self.work
        work.segments, work.n_segments = addressof(part.segments), part.count
        work.from_sums, work.sums, work.kept, work.scale = sums is not None, sums, kept, scale
        work.sums_of = addressof(self.to_sums) if first else None
        work.action = action
        kernels.update(byref(work))

    def _second_phase(self, kept: Tensor) -> list[float]:
        """Behind all tiles, of all elements at once. Returns the squares of the norms of sums, if there are
        limits."""
        buckets, at, limits = self.buckets, kept.data_ptr(), self.args.limits
        segments = [(t, 0, n, buckets.offsets[t]) for t, n in enumerate(buckets.numels)]
        whole, squares, scale = Part(kernels.segments(segments), len(segments), 0), [], 1.0
        if limits is not None:
            squares = [of_sum for (of_sum,) in self._norms(1)]
            scale = factor(limits.tolist(), math.sqrt(sum(squares)))
        if not RULES[self.args.rule].by_norms:
            self._run(whole, kernels.UPDATE, at, scale=scale)
            return squares
        if limits is None:
            norms = self._norms(2)
        else:
            self._run(whole, kernels.DIRECT, at, at, scale=scale)
            norms = [self.norms[i : i + 2] for i in range(0, len(self.norms), 2)]
        for t, (row, of) in enumerate(zip(self.numbers.tolist(), norms, strict=True)):
            self.trusts[t] = trust(row, *of)
        self._run(whole, kernels.APPLY, at)
        return squares

    def finish(self) -> tuple[Tensor, Tensor]:
        squares = [] if self.kept is None else self._second_phase(self.kept)
        for given, flat in zip(self.given, self.flat, strict=True):
            if flat is not given:
                given.detach().copy_(flat)
        torch.autograd.graph.increment_version(self.given)
        found = torch.tensor(squares, dtype=torch.float64, device="cpu")
        return found, self.sums

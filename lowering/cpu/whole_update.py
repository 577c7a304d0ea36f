"""Runs all_reduce_update on CPU ranks that share memory.

The plans and the memory are those of reduce_update_gather (`update_executor`), but an owner's outbox has sums
in place of new parameters, and whoever reads a tile of sums applies the rule to it.

LAMB has a second phase behind all tiles: a rank keeps the direction of the whole tensor until its norms are
known. Squares of tiles are added in the order of the elements, not in that of the tiles' arrival, so that all
ranks have the same bits."""

from __future__ import annotations

from contextlib import nullcontext
from ctypes import addressof, byref, c_double, c_float, c_void_p, pointer
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autofuse.lowering.buckets import Buckets, buckets_of
from autofuse.lowering.cpu.scratch import scratch
from autofuse.lowering.cpu.update_executor import Part, Recipe, moves, part_of, piece_shapes, recipe_of
from autofuse.lowering.cpu.workspace import Call, workspace_for
from autofuse.lowering.plan import Compute, Copy, Reduce
from autofuse.lowering.update_rules import NUMBERS, RULES, trust
from autofuse.native_kernels.cpu import optimizer as kernels

if TYPE_CHECKING:
    from autofuse.lowering.ops.all_reduce_update import AllReduceUpdate

OP = "all_reduce_update"
WIDTH = 4  # bytes of an element of states and sums, and between those of gradients


def run_whole_update(args: AllReduceUpdate) -> Tensor:
    """The op. States are float32; gradient and parameter have any dtype of the kernels."""
    workspace = workspace_for(args.group_name)
    buckets = buckets_of((args.grad.numel(),), workspace.world)
    count = args.grad.numel()
    with scratch(workspace, count) if RULES[args.rule].by_norms else nullcontext() as kept:
        direction = None if kept is None else kept[:count]
        step = _Step(args, buckets, workspace.world, workspace.rank, direction)
        for piece, shape in enumerate(piece_shapes(OP, args.order, buckets)):
            recipe = recipe_of(shape, workspace.rank)
            key = f"{tuple(args.grad.shape)} {args.reduce_op}, {recipe.agreement}"
            with workspace.call(OP, args.site, key, recipe.outbox.end) as call:
                step.piece(call, piece, recipe)
        return step.finish()


class _Step:
    """One call of the op: its tensors as kernels read them. direction: memory for that of LAMB."""

    def __init__(
        self, args: AllReduceUpdate, buckets: Buckets, world: int, rank: int, direction: Tensor | None
    ) -> None:
        self.args, self.buckets, self.world, self.rank = args, buckets, world, rank
        self.given = [args.params[0], *args.states]
        # Kernels read flat memory; the sum comes in the order of the elements of the parameter.
        self.flat = [t if t.is_contiguous() else t.detach().contiguous() for t in self.given]
        self.grad, self.numbers = args.grad.contiguous(), args.numbers.float().contiguous()
        self.sum = torch.empty_like(self.grad) if args.keep_sum else None
        self.direction = direction
        self.norms: dict[int, tuple[float, float]] = {}  # squares, by the start of the tile
        self.scale = 1 / world if args.reduce_op == "avg" else 1.0
        self.params_of, self.grads_of = kernels.pointers(self.flat[:1]), kernels.pointers([self.grad])
        self.of_param, self.of_grad = (kernels.dtypes([t.dtype]) for t in (self.flat[0], self.grad))
        self.parts, self.squares, self.trust = (c_void_p * world)(), c_double(), c_float()
        self.of_tile = (c_double * 2)()
        self.work = kernels.Work(
            params_of=addressof(self.params_of), grads_of=addressof(self.grads_of),
            param_dtypes_of=addressof(self.of_param), grad_dtypes_of=addressof(self.of_grad),
            numbers_of=self.numbers.data_ptr(), row=NUMBERS, trust_of=addressof(self.trust),
            norms_of=addressof(self.of_tile), parts=addressof(self.parts), part_width=WIDTH, out_width=WIDTH,
            squares=pointer(self.squares), world=world, rank=rank, rule=RULES[args.rule].code,
        )  # fmt: skip

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
                        self.of_grad,
                        self.grads_of,
                        True,
                    )
                case Reduce():
                    self._run(part, there, kernels.SUM)
                    if self.grad.dtype != torch.float32:
                        sums = floats(there, part)
                        sums.copy_(sums.to(self.grad.dtype))  # the collective rounds
                    self._apply(part, there)
                case Copy():
                    self._apply(part, there)

    def _apply(self, part: Part, sums: int) -> None:
        if not part.count:
            return
        start, count = part.segments[1:3]
        if self.direction is None:
            self._run(part, sums, kernels.UPDATE)
        else:
            own = self.direction[start : start + count]
            own.copy_(floats(sums, part))  # peers read the sums
            self._run(part, own.data_ptr(), kernels.DIRECT)
            self.norms[start] = (self.of_tile[0], self.of_tile[1])
            self.of_tile[0] = self.of_tile[1] = 0.0
        if self.sum is not None:
            self.sum.view(-1)[start : start + count] = floats(sums, part)

    def _run(self, part: Part, sums: int, action: int) -> None:
        """Sums what ranks have sent, or applies the rule to sums. There is one tensor: one segment a tile."""
        if not part.count:
            return
        work, start = self.work, part.segments[1]
        work.segments, work.n_segments = addressof(part.segments), part.count
        for i, state in enumerate(self.flat[1:]):
            work.states[i] = state.data_ptr() + WIDTH * start
        work.from_sums, work.scale = action != kernels.SUM, self.scale if action == kernels.SUM else 1.0
        work.sums, work.action = sums, action
        kernels.update(byref(work))

    def _second_phase(self, direction: Tensor) -> None:
        of_p, of_u = (sum(values) for values in zip(*(n for _, n in sorted(self.norms.items())), strict=True))
        self.trust.value = trust(self.numbers.tolist(), of_p, of_u)
        whole = kernels.segments([(0, 0, direction.numel(), 0)])
        self._run(Part(whole, 1, 0), direction.data_ptr(), kernels.APPLY)

    def finish(self) -> Tensor:
        if self.direction is not None and self.norms:
            self._second_phase(self.direction)
        for given, flat in zip(self.given, self.flat, strict=True):
            if flat is not given:
                given.detach().copy_(flat)
        torch.autograd.graph.increment_version(self.given)
        return self.grad.new_empty(0) if self.sum is None else self.sum


def floats(sums: int, part: Part) -> Tensor:
    """The sums of a tile, at an address."""
    return torch.frombuffer((c_float * part.segments[2]).from_address(sums), dtype=torch.float32)

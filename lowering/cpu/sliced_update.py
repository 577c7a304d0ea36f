"""Runs reduce_scatter_update_all_gather on CPU ranks that share memory.

The plans and the memory are those of reduce_update_gather (`update_executor`), for one tensor whose owners
have as many elements each: an owner adds what its peers have sent, applies the rule to its slice, and hands
the new parameters out."""

from __future__ import annotations

from ctypes import addressof, byref, c_float, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autofuse.lowering.cpu.update_executor import Part, Recipe, moves, part_of, piece_shapes, recipe_of
from autofuse.lowering.cpu.workspace import Call, Workspace
from autofuse.lowering.cpu.workspaces import workspace_for
from autofuse.lowering.plan import Compute, Copy, Reduce
from autofuse.lowering.update_rules import NUMBERS, RULES
from autofuse.native_kernels.cpu import optimizer as kernels

if TYPE_CHECKING:
    from autofuse.lowering.ops.reduce_scatter_update_all_gather import ReduceScatterUpdateAllGather

OP = "reduce_scatter_update_all_gather"
WIDTH = 4  # bytes of an element of states and sums, and between those of gradients and new parameters


def run_sliced_update(args: ReduceScatterUpdateAllGather) -> Tensor:
    """The op. States are float32; gradient, parameter and what is gathered have any dtype of the kernels."""
    workspace = workspace_for(args.group_name)
    step = _Step(args, workspace)
    for piece, shape in enumerate(piece_shapes(OP, args.order, args.buckets)):
        recipe = recipe_of(shape, workspace.rank)
        given = f"{args.grad.dtype} {tuple(args.grad.shape)} {args.reduce_op} {args.gathered}"
        key = f"{given}, {recipe.agreement}"
        with workspace.call(OP, args.site, key, recipe.outbox.end) as call:
            step.piece(call, piece, recipe)
    return step.finish()


class _Step:
    """One call of the op: its tensors as kernels read them."""

    def __init__(self, args: ReduceScatterUpdateAllGather, workspace: Workspace) -> None:
        self.args, self.buckets, self.rank = args, args.buckets, workspace.rank
        self.world = world = workspace.world
        # Kernels read flat memory.
        self.flat = [s if s.is_contiguous() else s.detach().contiguous() for s in args.states]
        self.grad, self.numbers = args.grad.contiguous(), args.numbers.float().contiguous()
        self.gathered = args.grad.new_empty(args.grad.shape, dtype=args.gathered)
        self.own = self.gathered.view(world, *args.slice.shape)[workspace.rank]
        has_master = args.param is None and args.slice.dtype == torch.float32
        self.master = self.flat[-1].data_ptr() if has_master else None
        if not has_master:
            self.own.copy_(args.slice.detach())
        self.scale = 1 / world if args.reduce_op == "avg" else 1.0
        self.params_of, self.grads_of = kernels.pointers([self.gathered]), kernels.pointers([self.grad])
        self.of_param, self.of_grad = kernels.dtypes([args.gathered]), kernels.dtypes([self.grad.dtype])
        self.parts, self.trust = (c_void_p * world)(), c_float()
        self.work = kernels.Work(
            params_of=addressof(self.params_of), grads_of=addressof(self.grads_of),
            param_dtypes_of=addressof(self.of_param), grad_dtypes_of=addressof(self.of_grad),
            numbers_of=self.numbers.data_ptr(), row=NUMBERS, trust_of=addressof(self.trust),
            parts=addressof(self.parts), part_width=WIDTH, out_width=WIDTH, rounds=True, world=world,
            rank=workspace.rank, rule=RULES[args.rule].code,
        )  # fmt: skip

    def piece(self, call: Call, piece: int, recipe: Recipe) -> None:
        for action, tile, there in moves(call, recipe, self.world, self.rank, self.parts):
            part = part_of(self.buckets, piece, tile)
            match action:
                case Compute(dest=dest) if dest != self.rank:
                    self._copy(there, part, self.grads_of, self.of_grad, sent=True)
                case Reduce():
                    self._reduce(there, part)
                case Copy():
                    self._copy(there, part, self.params_of, self.of_param, sent=False)

    def _copy(self, there: int, part: Part, tensors: object, dtypes: object, sent: bool) -> None:
        """The gradient to its owner, or the new parameters from there."""
        kernels.copy_segments(there, WIDTH, part.segments, part.count, tensors, dtypes, self.grads_of, sent)

    def _reduce(self, there: int, part: Part) -> None:
        """Sums what ranks have sent, updates the slice, and leaves the new parameters for peers."""
        if not part.count:
            return
        work = self.work
        work.segments, work.n_segments = addressof(part.segments), part.count
        for i in range(len(RULES[self.args.rule].states)):
            state = self.flat[i]
            work.states[i] = state.data_ptr() + WIDTH * (self.args.offset(state) + part.at)
        if self.master is not None:
            work.master = self.master + WIDTH * part.at
        work.from_sums, work.scale, work.sums, work.out = False, self.scale, there, there
        if self.grad.dtype != torch.float32:  # the collective rounds
            work.action, work.kept = kernels.SUM, there
            kernels.update(byref(work))
            work.from_sums, work.scale = True, 1.0
        work.action = kernels.UPDATE
        kernels.update(byref(work))

    def finish(self) -> Tensor:
        if self.args.param is None and self.master is None:
            self.flat[-1].copy_(self.own)
        for given, flat in zip(self.args.states, self.flat, strict=True):
            if flat is not given:
                given.detach().copy_(flat)
        torch.autograd.graph.increment_version(self.args.states)
        return self.gathered

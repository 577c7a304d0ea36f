"""Runs reduce_update_gather on CPU ranks that share memory.

Elements are exchanged piece by piece (`lowering.buckets`), each in a call with a plan of its own, so that the
shared memory is small and tiles stay in the caches. Memory of rank r in a call, tiles as in `tiles.Buffer`:

    inbox    gradients of the chunk of rank r, a slot per source
    outbox   new parameters of the chunk of rank r, from which peers copy them

An element has as many bytes there as the widest dtype; a segment of a narrower dtype is packed from its
start on.

Usually a plan does it all: peers' gradients are added, the rule is applied, the result is handed out. Two
phases are needed where every element depends on a norm: of all gradients (clipping), or of its tensor
(LAMB). Then the first phase keeps sums or directions, as a reduce_scatter; ranks exchange their parts of
the norms; the second one is a gather."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from ctypes import addressof, byref, c_double, c_float, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autofuse.lowering import agreement
from autofuse.lowering.buckets import Buckets, buckets_of
from autofuse.lowering.cpu.scratch import scratch
from autofuse.lowering.cpu.tiles import Buffer, with_tiles
from autofuse.lowering.cpu.told import exchange_all
from autofuse.lowering.cpu.workspace import Call, Workspace
from autofuse.lowering.cpu.workspaces import workspace_for
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.plan import Action, Compute, Copy, Reduce, Signal, Tile, Wait
from autofuse.lowering.reference.update import check, tell
from autofuse.lowering.update_rules import NUMBERS, RULES, clip, trust
from autofuse.native_kernels.cpu import DTYPES
from autofuse.native_kernels.cpu import optimizer as kernels

if TYPE_CHECKING:
    from autofuse.lowering.ops.reduce_update_gather import ReduceUpdateGather

OP = "reduce_update_gather"
REDUCTION, GATHER = "matmul_reduce_scatter", "matmul_all_gather"
"""Ops whose plans move data as the two phases do."""

TILE, TILES = 1 << 15, 16
"""Elements of a tile, and tiles of an owner in a call. A tile and its states fit into the L2 cache."""


@lru_cache(maxsize=256)
def piece_shapes(op: str, order: str, buckets: Buckets) -> list[PlanShape]:
    """What the plans of the calls are made from."""
    return [
        PlanShape(op, order, buckets.world, (tuple((1, n) for n in piece),), (1, TILE))
        for piece in buckets.pieces(TILE * TILES)
    ]


@dataclass(frozen=True)
class Part:
    """The segments of a tile, for the kernels, and where the tile begins in the run of its owner."""

    segments: Any
    count: int
    at: int


@lru_cache(maxsize=1 << 14)
def part_of(buckets: Buckets, piece: int, tile: Tile) -> Part:
    start, stop = buckets.starts[tile.chunk : tile.chunk + 2]
    at = piece * TILE * TILES + tile.cols.start
    found = list(buckets.segments(start + at, min(stop, start + at + len(tile.cols))))
    return Part(kernels.segments(found), len(found), at)


@dataclass(frozen=True)
class Recipe:
    """What follows from a plan."""

    actions: tuple[tuple[Action, int], ...]
    agreement: str
    inbox: Buffer
    outbox: Buffer


@lru_cache(maxsize=1024)
def recipe_of(shape: PlanShape, rank: int) -> Recipe:
    plan = shape.plan(rank)
    tiles = [plan.tiles(c) for c in range(plan.world)]
    inbox = Buffer(0, plan.world, tiles, torch.float32)
    outbox = Buffer(inbox.end, 1, tiles, torch.float32)
    return Recipe(tuple(with_tiles(plan.actions)), plan.agreement, inbox, outbox)


def moves(
    call: Call, recipe: Recipe, world: int, rank: int, parts: Any
) -> Iterator[tuple[Compute | Copy | Reduce, Tile, int]]:
    """Runs a plan but for its work on tiles, which it yields in order: the action, its tile, and an address.

    The address is where a tile is sent to (Compute for another rank), where it lies at its owner (Copy), or
    where the owner hands it out (Reduce, and Compute for itself). For an owner `parts` are set to what all
    ranks have sent of the tile.
    """
    inbox, outbox = recipe.inbox, recipe.outbox
    base = [call.tensor(r, 0, (outbox.end,), torch.uint8).data_ptr() for r in range(world)]
    for action, awaited in recipe.actions:
        match action:
            case Signal(dest=dest, slot=slot):
                call.signal(dest, slot)
            case Wait(source=source, slot=slot):
                call.wait(source, slot, awaited)
            case Compute(tile=tile, dest=dest) if dest != rank:
                yield action, tile, base[dest] + inbox.offset(tile, rank)
            case Copy(tile=tile, source=source):
                yield action, tile, base[source] + outbox.offset(tile, 0)
            case Reduce(tile=tile) | Compute(tile=tile):
                for r in range(world):
                    parts[r] = base[rank] + inbox.offset(tile, r)
                yield action, tile, base[rank] + outbox.offset(tile, 0)


def run_update(args: ReduceUpdateGather) -> Any:
    """The op; NotImplemented for a dtype without a kernel."""
    params = [p.dtype for p in args.params]
    if not {*params} <= DTYPES.keys():
        return NotImplemented
    # Gradients of other dtypes are refused; all ranks must come to where that happens.
    pairs = zip(params, args.grads, strict=True)
    grads = [g.dtype if g is not None and g.dtype in DTYPES else p for p, g in pairs]
    workspace = workspace_for(args.group_name)
    kind = _kind(
        buckets_of(tuple(p.numel() for p in args.params), workspace.world), *map(tuple, (params, grads))
    )
    check(args, kind.buckets, torch.float32)
    return _Step(args, workspace, kind).run()


@dataclass(frozen=True)
class _Kind:
    """What follows from sizes and dtypes. widths: bytes between elements in the inbox and the outbox."""

    buckets: Buckets
    digest: int
    widths: tuple[int, int]
    param_dtypes: Any
    grad_dtypes: Any


@lru_cache(maxsize=256)
def _kind(buckets: Buckets, params: tuple[torch.dtype, ...], grads: tuple[torch.dtype, ...]) -> _Kind:
    of_grads, of_params = (max((d.itemsize for d in found), default=4) for found in (grads, params))
    digest = agreement.digest(buckets.numels, params)
    return _Kind(buckets, digest, (of_grads, of_params), kernels.dtypes(params), kernels.dtypes(grads))


class _Step:
    """One call of the op: the tensors and numbers as kernels read them, and the phases."""

    def __init__(self, args: ReduceUpdateGather, workspace: Workspace, kind: _Kind) -> None:
        self.args, self.workspace, self.rule = args, workspace, RULES[args.rule]
        self.buckets, self.widths = kind.buckets, kind.widths
        # Kernels read flat memory. Gradients of a wrong kind are refused before anything reads them.
        self.codes = [agreement.code(p, g) for p, g in zip(args.params, args.grads, strict=True)]
        self.params = [p if p.is_contiguous() else p.detach().contiguous() for p in args.params]
        self.grads = [
            g.contiguous() if g is not None and code == agreement.GIVEN else None
            for g, code in zip(args.grads, self.codes, strict=True)
        ]
        self.numbers = args.numbers.float().contiguous()
        self.of_params, self.of_grads = kernels.pointers(self.params), kernels.pointers(self.grads)
        self.param_dtypes, self.grad_dtypes = kind.param_dtypes, kind.grad_dtypes
        self.trusts = (c_float * len(self.params))()
        self.norms = (c_double * (2 * len(self.params)))()
        self.squares = (c_double * len(self.params))()
        self.parts = (c_void_p * workspace.world)()
        self.sums: Tensor | None = None
        self.norm = 0.0
        own = len(self.rule.states)
        self.states = [s.data_ptr() for s in args.states[:own]]
        self.master = args.states[own].data_ptr() if len(args.states) > own else None
        self.mean = 1 / workspace.world if args.reduce_op == "avg" else 1.0
        self.work = kernels.Work(
            params_of=addressof(self.of_params), grads_of=addressof(self.of_grads),
            param_dtypes_of=addressof(self.param_dtypes), grad_dtypes_of=addressof(self.grad_dtypes),
            numbers_of=self.numbers.data_ptr(), row=NUMBERS, trust_of=addressof(self.trusts),
            norms_of=addressof(self.norms), parts=addressof(self.parts), part_width=self.widths[0],
            out_width=self.widths[1], squares_of=addressof(self.squares), scale=self.mean,
            world=workspace.world, rank=workspace.rank, rule=self.rule.code,
        )  # fmt: skip
        self.key = f"{kind.digest:x} {args.rule} {args.reduce_op}"

    def run(self) -> Tensor:
        args, by_norms = self.args, self.rule.by_norms
        norm = args.numbers.new_empty(() if args.wants_norm else (0,), dtype=torch.float32)
        if not args.wants_norm and not by_norms:
            self._exchange(OP, kernels.UPDATE, self._agree)
        else:
            with scratch(self.workspace, self.buckets.owned(self.workspace.rank)) as self.sums:
                self._exchange(REDUCTION, kernels.SUM if args.wants_norm else kernels.DIRECT, self._agree)
                self.work.from_sums, self.work.scale = True, 1.0
                self._exchange(GATHER, kernels.APPLY if by_norms else kernels.UPDATE, self._between)
            if args.wants_norm:
                norm.fill_(self.norm)
        changed = []
        for p, flat, g in zip(args.params, self.params, args.grads, strict=True):
            if g is not None:
                changed.append(p)
                if flat is not p:
                    p.detach().copy_(flat)
        torch.autograd.graph.increment_version([*changed, *args.states])
        return norm

    def _agree(self, call: Call) -> Exception | None:
        """Whether all ranks can go on. Nothing has been written."""
        told = exchange_all(call, tell(self.args, self.buckets, self.codes))
        found = agreement.problem(OP, told, self.args.names)
        return agreement.Disagreement(found) if found else None

    def _between(self, call: Call) -> Exception | None:
        """From the first phase to the second: the norms that all elements depend on."""
        args, rank = self.args, self.workspace.rank
        if args.wants_norm:
            self.norm = math.sqrt(sum(value for (value,) in _exchange_floats(call, [sum(self.squares)])))
            if args.error_if_nonfinite and not math.isfinite(self.norm):
                return agreement.not_finite(OP, self.norm)
            self.work.scale = clip(self.norm, args.max_norm)
            if self.rule.by_norms:
                for piece, shape in enumerate(piece_shapes(GATHER, args.order, self.buckets)):
                    for tile in shape.plan(rank).tiles(rank):
                        self._update(part_of(self.buckets, piece, tile), kernels.DIRECT, None)
                self.work.scale = 1.0
        if self.rule.by_norms:
            of_ranks = _exchange_floats(call, self.norms[:])
            totals = [sum(values) for values in zip(*of_ranks, strict=True)]
            for t, row in enumerate(args.numbers.tolist()):
                self.trusts[t] = trust(row, totals[2 * t], totals[2 * t + 1])
        return None

    def _exchange(self, op: str, what: int, before: Callable[[Call], Exception | None]) -> None:
        """All pieces by the plans of `op`. `before` runs in the first call; what it returns is raised behind
        it: all ranks find the same, and the workspace stays usable."""
        rank, error = self.workspace.rank, None
        for piece, shape in enumerate(piece_shapes(op, self.args.order, self.buckets)):
            recipe = recipe_of(shape, rank)
            key = f"{self.key}, {op}, {recipe.agreement}"
            with self.workspace.call(OP, self.args.site, key, recipe.outbox.end) as call:
                error = before(call) if piece == 0 else None
                if error is None:
                    self._piece(call, piece, recipe, what)
            if error is not None:
                raise error

    def _piece(self, call: Call, piece: int, recipe: Recipe, what: int) -> None:
        """Runs one plan. A REDUCE plan works on own tiles in Reduce, a PUBLISH plan in Compute."""
        rank, world = self.workspace.rank, self.workspace.world
        hands_out = what != kernels.SUM and what != kernels.DIRECT and world > 1
        for action, tile, there in moves(call, recipe, world, rank, self.parts):
            part = part_of(self.buckets, piece, tile)
            match action:
                case Compute(dest=dest) if dest != rank:
                    self._copy(there, True, part)
                case Copy():
                    self._copy(there, False, part)
                case _ if self.work.from_sums or isinstance(action, Reduce):
                    self._update(part, what, there if hands_out else None)

    def _copy(self, there: int, sent: bool, part: Part) -> None:
        """Gradients that are sent to their owner, or parameters that come from there."""
        tensors, dtypes = (self.of_grads, self.grad_dtypes) if sent else (self.of_params, self.param_dtypes)
        width = self.widths[0 if sent else 1]
        kernels.copy_segments(there, width, part.segments, part.count, tensors, dtypes, self.of_grads, sent)

    def _update(self, part: Part, what: int, out: int | None) -> None:
        work = self.work
        work.segments, work.n_segments = addressof(part.segments), part.count
        for i, state in enumerate(self.states):
            work.states[i] = state + 4 * part.at
        if self.master is not None:
            work.master = self.master + 4 * part.at
        if self.sums is not None:
            work.sums = work.kept = self.sums.data_ptr() + 4 * part.at
        work.out, work.action = out, what
        kernels.update(byref(work))


def _exchange_floats(call: Call, values: Sequence[float]) -> list[tuple[float, ...]]:
    n = len(values)
    bits = struct.unpack(f"{n}q", struct.pack(f"{n}d", *values))
    return [struct.unpack(f"{n}d", struct.pack(f"{n}q", *row)) for row in exchange_all(call, bits)]

"""The steps of a reduction: what each action of its plan does with tensors and shared memory.

The memory of rank r, with tiles as in `tiles.Buffer`:

    direct, oblivious   partial tiles of chunk r, a slot per source; for all_reduce then its reduced tiles
    one-shot            this rank's partial tiles of everything
    ring                arriving fp32 sums, a slot per chunk; for all_reduce then the finished tiles alike
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from autofuse.lowering.cpu.recipes import State, Step
from autofuse.lowering.cpu.tiles import Buffer, Cut, Run
from autofuse.lowering.plan import Action, Compute, Copy, Plan, Reduce, Send, Signal, Store, Tile, Wait
from autofuse.lowering.reference.bags import of_bags
from autofuse.lowering.reference.product import evaluate, parse
from autofuse.native_kernels.cpu import accumulate_rows, reduce_rows


class ReduceSteps:
    """Turns the actions of one plan into steps. The output is all that a call returns besides the product."""

    results: tuple[tuple[tuple[int, int], torch.dtype], ...] = ()

    def __init__(
        self, plan: Plan, cut: Cut, dim: int, whole: bool, product: str, reduce_op: str, keep: bool,
        dtype: torch.dtype, shape: tuple[int, int],
    ) -> None:  # fmt: skip
        self.plan, self.cut, self.dim, self.whole = plan, cut, dim, whole
        self.product, self.keep, self.dtype = product, keep, dtype
        self.sums = self.shape = shape
        self.rows = plan.world * shape[0] if dim == 0 and plan.op != "matmul_all_reduce" else shape[0]
        self.scale = 1 / plan.world if reduce_op == "avg" else 1.0
        self.ring = plan.order.value == "ring"
        self.everywhere = plan.op == "matmul_all_reduce"
        tiles = [plan.tiles(c) for c in range(plan.world)]
        self.partial = Buffer(0, plan.world, tiles, torch.float32 if self.ring else dtype)
        finished = 0 if not self.everywhere or plan.one_shot else plan.world if self.ring else 1
        self.finished = Buffer(self.partial.end, finished, tiles, dtype)
        self.nbytes = self.finished.end

    def steps(self, actions: Iterable[tuple[Action, int]]) -> tuple[Step, ...]:
        """The steps of all actions. Each action is paired with the index of a tile (`tiles.with_tiles`). The
        error of a wait names this tile."""
        return tuple(self.step(*pair) for pair in actions)

    def step(self, action: Action, awaited: int) -> Step:
        match action:
            case Compute(tile=tile, dest=dest, store=Store.UPDATE, step=stage):
                return self._update(tile, dest, stage)
            case Compute(tile=tile, dest=dest):
                return self._compute(tile, dest)
            case Signal(dest=dest, slot=slot):
                return lambda s: s.call.signal(dest, slot)
            case Wait(source=source, slot=slot):
                return lambda s: s.call.wait(source, slot, awaited)
            case Reduce(tile=tile):
                return self._reduce(tile)
            case Send(tile=tile, dest=dest):
                return self._send(tile, dest)
            case Copy(tile=tile, source=source):
                return self._copy(tile, source)
        raise AssertionError(f"a reduce plan has no {action}")

    def _tile(self, buffer: Buffer, tile: Tile, rank: int, source: int) -> Callable[[State], Tensor]:
        """A function that finds a tile in the buffer of `rank`."""
        offset, shape, dtype = buffer.offset(tile, source), (len(tile.rows), len(tile.cols)), buffer.dtype
        return lambda s: s.call.tensor(rank, offset, shape, dtype)

    def _run(self, tile: Tile) -> Run:
        """Where the tile lies along the dim of the product that is cut; it spans the other one."""
        return self.cut.run(tile.chunk, tile.rows if self.dim == 0 else tile.cols)

    def _place(self, tile: Tile) -> Run:
        """Where it lies in the output: the whole matrix for all_reduce, else this rank's chunk."""
        span = tile.rows if self.dim == 0 else tile.cols
        return self._run(tile) if self.everywhere else Run(span.start, len(span))

    def _in_output(self, tile: Tile) -> Callable[[State], Tensor]:
        """A function that finds a tile in the output."""
        dim, place = self.dim, self._place(tile)
        return lambda s: place.read(s.out, dim)

    def _evaluate(self, tile: Tile) -> Callable[[State, Tensor], object]:
        """A function that computes a tile of the product into a given tensor."""
        dim, run, product, keep = self.dim, self._run(tile), self.product, self.keep
        if self.whole:
            return lambda s, target: target.copy_(run.read(s.product, dim))

        pooling = parse(product).pooling
        bags = run.read(torch.arange(self.rows), 0) if pooling is not None else None

        def compute(s: State, target: Tensor) -> None:
            w = [run.read(t, t.dim() - 1) for t in s.w] if dim == 1 else s.w
            if bags is not None and pooling is not None:
                x, operands = of_bags(bags, s.x, s.operands, pooling)
            else:
                x = [run.read(t, 0) for t in s.x] if dim == 0 else list(s.x)
                operands = [run.read_operand(t, dim) for t in s.operands]
            made = evaluate(target, x, w, operands, product)
            if keep:
                assert s.kept is not None
                run.write(s.kept, dim, made)

        return compute

    def _compute(self, tile: Tile, dest: int) -> Step:
        source = tile.chunk if self.plan.one_shot else self.plan.rank
        target, compute = self._tile(self.partial, tile, dest, source), self._evaluate(tile)
        return lambda s: compute(s, target(s))

    def _parts(self, tile: Tile) -> list[Callable[[State], Tensor]]:
        """How to find what the ranks add up."""
        world = range(self.plan.world)
        if self.plan.one_shot:
            return [self._tile(self.partial, tile, peer, tile.chunk) for peer in world]
        return [self._tile(self.partial, tile, self.plan.rank, peer) for peer in world]

    def _reduce(self, tile: Tile) -> Step:
        plan, scale, output, parts = self.plan, self.scale, self._in_output(tile), self._parts(tile)
        if not self.everywhere or plan.one_shot:
            return lambda s: reduce_rows(output(s), [part(s) for part in parts], scale)
        finished = self._tile(self.finished, tile, plan.rank, 0)

        def reduce(s: State) -> None:
            shared = finished(s)
            reduce_rows(shared, [part(s) for part in parts], scale)
            output(s).copy_(shared)

        return reduce

    def _update(self, tile: Tile, dest: int, stage: int) -> Step:
        rank, shape, dtype = self.plan.rank, (len(tile.rows), len(tile.cols)), self.dtype
        compute, scale, output = self._evaluate(tile), self.scale, self._in_output(tile)
        received = self._tile(self.partial, tile, rank, tile.chunk)
        target = self._tile(self.partial, tile, dest, tile.chunk)

        def update(s: State) -> None:
            part = torch.empty(shape, dtype=dtype)
            compute(s, part)
            sums = [received(s), part] if stage else [part]
            if dest == rank:
                reduce_rows(output(s), sums, scale)
            elif stage:
                accumulate_rows(target(s), sums[0], part)
            else:
                target(s).copy_(part)

        return update

    def _send(self, tile: Tile, dest: int) -> Step:
        output = self._in_output(tile)
        target = self._tile(self.finished, tile, dest, tile.chunk)
        if tile.chunk == self.plan.rank:
            return lambda s: target(s).copy_(output(s))
        source = self._tile(self.finished, tile, self.plan.rank, tile.chunk)
        return lambda s: target(s).copy_(source(s))

    def _copy(self, tile: Tile, source: int) -> Step:
        output = self._in_output(tile)
        finished = self._tile(self.finished, tile, source, tile.chunk if self.ring else 0)
        return lambda s: output(s).copy_(finished(s))

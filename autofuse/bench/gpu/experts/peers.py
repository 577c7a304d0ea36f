"""The ways to run an expert cell: with what torch ships, and ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autofuse.bench.gpu.exchange.work import Sample, Variant, Work, exchange
from autofuse.bench.gpu.experts import vdev as expert_vdev
from autofuse.bench.gpu.experts.cells import Cell
from autofuse.bench.gpu.experts.matmuls import Run, empty, matmuls, plain
from autofuse.bench.gpu.experts.routes import Route
from autofuse.bench.gpu.named_ways import Fused
from autofuse.bench.gpu.ratios import BYTES, DTYPE
from autofuse.lowering.gpu.choice.timing import copies_of

SAMPLED = 16
"""Rows from every rank to every rank whose exact values are computed."""


@dataclass(frozen=True)
class Operands:
    """`x`: what the op is given: of a combine [R, K] in expert order, of a dispatch [rows of own tokens, K];
    `inputs`: [R, K] in expert order, what is multiplied; `weights`: copies, each [E, K, columns] for every
    weight of the cell; `group_name`: the ranks."""

    cell: Cell
    route: Route
    x: Tensor
    inputs: Tensor
    weights: list[list[Tensor]]
    group_name: str


def operands(cell: Cell, device: torch.device, group_name: str) -> Operands:
    """Random operands, other ones on every rank."""
    route = Route(cell, dist.get_rank(), device)
    dtype = getattr(torch, DTYPE)
    x = torch.randn(route.rows if cell.combines else cell.sent, cell.k, device=device, dtype=dtype)
    inputs = x
    if not cell.combines:
        received = route.dispatch(x, x.new_empty(route.rows, cell.k))
        inputs = route.to_experts(received, torch.empty_like(received))
    shape = (cell.experts, cell.k, cell.columns)
    copies = copies_of(cell.experts * cell.k * cell.n * BYTES)
    weights = [
        [torch.randn(shape, device=device, dtype=dtype).mul_(cell.k**-0.5) for _ in range(cell.weights)]
        for _ in range(copies)
    ]
    return Operands(cell, route, x, inputs, weights, group_name)


def work(cell: Cell, device: torch.device, group_name: str) -> Work:
    """All that there is to measure of a cell."""
    given = operands(cell, device, group_name)
    product, whole = exact(given)
    fused = Fused(cell.op, [arguments(given, w) for w in given.weights], whole=True)

    def variant(run: Run, exact: Sample) -> Variant:
        return Variant(lambda i: run(given.weights[i % len(given.weights)]), _error(exact))

    alone = matmuls(given.route, given.inputs, empty(given.route, given.x))
    variants = {
        "compute": {name: variant(run, product) for name, run in alone.items()},
        "parts": _parts(given, whole),
        "peers": {name: variant(run, whole) for name, run in peers(given).items()},
        "ours": {"auto": Variant(fused.auto, _error(whole))},
    }
    # The reference reads offsets on the host.
    return Work(variants, fused, capturable=cell.even or bool(fused.names()))


def _error(exact: Sample) -> Callable[[Sequence[Tensor]], float]:
    """How to find the error of results: their columns are side by side in `exact`."""
    return lambda results: exact.error(torch.cat([y.flatten(0, -2) for y in results], 1))


def peers(given: Operands) -> dict[str, Run]:
    """What torch ships, with buffers in place."""
    cell, route, x = given.cell, given.route, given.x
    ordered = x.new_empty(route.rows, cell.width)
    received = x.new_empty(cell.sent if cell.combines else route.rows, cell.width)

    def combining(product: Run) -> Run:
        return lambda w: [route.combine(route.to_exchange(product(w)[0], ordered), received)]

    def dispatching(product: Run) -> Run:
        def run(w: Sequence[Tensor]) -> Sequence[Tensor]:
            route.to_experts(route.dispatch(x, received), ordered)
            return product(w)

        return run

    around = combining if cell.combines else dispatching
    products = matmuls(route, x if cell.combines else ordered, empty(route, x))
    found = {f"{name}+nccl": around(product) for name, product in products.items()}
    if expert_vdev.missing() is None:
        found["vdev_2d"] = expert_vdev.peer(route, x, given.group_name)
    return found


def _parts(given: Operands, whole: Sample) -> dict[str, Variant]:
    """The steps of the peers but for the matmul, on buffers of their own."""
    cell, route, x = given.cell, given.route, given.x
    rows = torch.linspace(0, route.rows - 1, SAMPLED * cell.world, device=x.device).long()

    def moved(ordered: Tensor) -> Callable[[Tensor], float]:
        """The error of the same rows in exchange order."""
        sample = Sample((route.rows, cell.width), rows, ordered[rows].double())
        return lambda result: sample.error(result[route.positions])

    if cell.combines:
        (product,) = plain(route, x, empty(route, x))(given.weights[0])
        sent = route.to_exchange(product, torch.empty_like(product))
        received = x.new_empty(cell.sent, cell.n)
        return {
            "all-to-all": Variant(lambda i: route.combine(sent, received), whole.error),
            "pack": Variant(lambda i: route.to_exchange(product, sent), moved(product)),
        }
    received = route.dispatch(x, torch.empty_like(given.inputs))
    ordered = torch.empty_like(received)
    same = Sample((route.rows, cell.k), rows, given.inputs[rows].double())
    return {
        "all-to-all": Variant(lambda i: route.dispatch(x, received), moved(given.inputs)),
        "unpack": Variant(lambda i: route.to_experts(received, ordered), same.error),
    }


def exact(given: Operands) -> tuple[Sample, Sample]:
    """With the first weights: the matmul alone, [R, N] in expert order, and the result of the op."""
    cell, route, device = given.cell, given.route, given.x.device
    rows = route.inverse[_spread(route.held, device).flatten().clamp(max=route.rows - 1)]
    values = _multiply(given, rows)
    product = Sample((route.rows, cell.n), rows, values)
    if not cell.combines:
        return product, product
    received = exchange(torch.empty_like(values), values, None, None).view(cell.world, SAMPLED, cell.n)
    some = torch.tensor(route.sent, device=device) > 0
    places = _spread(route.sent, device)[some]
    return product, Sample((cell.sent, cell.n), places.flatten(), received[some].flatten(0, 1))


def _spread(counts: list[int], device: torch.device) -> Tensor:
    """[W, SAMPLED]: numbers of rows out of each of W parts of so many; of an empty part, a neighbour's."""
    ends = torch.tensor(counts).cumsum(0).tolist()
    parts = [
        end - count + torch.linspace(0, max(0, count - 1), SAMPLED).long()
        for end, count in zip(ends, counts, strict=True)
    ]
    return torch.stack(parts).to(device)


def _multiply(given: Operands, rows: Tensor) -> Tensor:
    """Rows of the product in fp64: [S, N] for the rows [S] in expert order."""
    found = given.inputs.new_empty(rows.shape[0], given.cell.n, dtype=torch.float64)
    expert = given.route.expert[rows]
    for e in expert.unique().tolist():
        of_expert = expert == e
        weight = torch.cat([w[e] for w in given.weights[0]], 1)
        found[of_expert] = given.inputs[rows[of_expert]].double() @ weight.double()
    return found


def arguments(given: Operands, w: list[Tensor]) -> tuple[Any, ...]:
    """Those of the fused op: blocks of fixed capacity where routing is even, else ragged rows."""
    cell, route, x = given.cell, given.route, given.x
    if cell.even:
        lead = (cell.experts,) if cell.combines else (cell.world, cell.experts)
        x = x.view(*lead, -1, cell.k)
        ragged: tuple[Any, ...] = (0, None, None, [], [])
    else:
        splits = (route.sent, route.held) if cell.combines else (route.held, route.sent)
        ragged = (0, route.ends, route.positions, *splits)
    site = (1, 1, False, given.group_name, "direct", "bench")
    if cell.combines:
        return [x], w, [], [], "mm", *ragged, *site
    return x, w, [], "", *ragged, *site

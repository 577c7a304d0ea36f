"""Random residual streams: values that all_reduces and what lies between them compute, as data.

A stream is a list of steps. Each appends a value to a pool, computed from earlier ones, which it names by
their position. `program` runs it, and returns the values that `outputs` names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from hypothesis import strategies as st
from torch import Tensor

WIDTH, INNER = 6, 4

Step = tuple[str, int, int]
"""The name of a step, and the positions of the two values that it may read."""


@dataclass(frozen=True)
class Drawn:
    world: int
    shape: tuple[int, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    average: bool = False


def _rms(h: Tensor, other: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    wide = h.float()
    return inputs["gamma"] * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3)).to(h.dtype)


def _layer(h: Tensor, other: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    variance, mean = torch.var_mean(h, [-1], correction=0, keepdim=True)
    return (h - mean) * torch.rsqrt(variance + 1e-3) + inputs["gamma"]


def _rows(h: Tensor, other: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Through other views of the rows."""
    return (h.reshape(-1, WIDTH) * 0.5).reshape(h.shape).permute(*range(h.dim())).clone()


def _pairs(h: Tensor, other: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Two rows as one, where there is an even number."""
    odd = h.shape[-2] % 2
    pairs = h if odd else h.reshape(*h.shape[:-2], h.shape[-2] // 2, 2 * WIDTH)
    return torch.sigmoid(pairs).reshape(h.shape)


STEPS: dict[str, Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor]] = {
    "add": lambda h, other, inputs: h + other,
    "scale": lambda h, other, inputs: 0.5 * h - 1,
    "gate": lambda h, other, inputs: torch.where(inputs["rows"] > 0, h, torch.sigmoid(other)),
    "rms": _rms,
    "layer": _layer,
    "rows": _rows,
    "pairs": _pairs,
    "mix": lambda h, other, inputs: h * inputs["mask"],
    "weigh": lambda h, other, inputs: h + (h * other).sum(tuple(range(h.dim() - 1))),
    "most": lambda h, other, inputs: h - h.amax(-1, keepdim=True) + other.mean(-1).unsqueeze(-1),
    "flip": lambda h, other, inputs: h.flip(0),
    "local": lambda h, other, inputs: h * inputs["local"],
    "log": lambda h, other, inputs: h * inputs["rows"].abs().log(),
    "half": lambda h, other, inputs: h.to(torch.bfloat16).float(),
}
"""`flip` needs all rows, `local` differs between ranks: what reads them must not be cut. `log` makes NaN of
the zeros that rows are padded with."""


def program(drawn: Drawn) -> Callable[..., tuple[Tensor, ...]]:
    group = dist.group.WORLD
    op = "avg" if drawn.average else "sum"

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        inputs = dict(zip(NAMES, given, strict=False))
        pool, weights = [inputs["x"]], iter(given[len(NAMES) :])
        for name, a, b in drawn.steps:
            h, other = pool[a % len(pool)], pool[b % len(pool)]
            if name == "reduce":
                product = torch.tanh(h @ next(weights)) @ next(weights)
                assert group is not None
                pool.append(funcol.wait_tensor(funcol.all_reduce(product, op, group)))
            else:
                pool.append(STEPS[name](h, other, inputs))
        return (*(pool[o % len(pool)] for o in drawn.outputs), pool[-1])

    return run


NAMES = ("x", "gamma", "rows", "mask", "local")
SAME = ("x", "gamma", "rows", "mask")
"""The inputs that are the same on all ranks."""


def arguments(drawn: Drawn, rank: int) -> list[Tensor]:
    same, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(10 + rank)

    def draw(generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rows = [*drawn.shape, 1]
    values = [draw(same, *drawn.shape, WIDTH), draw(same, WIDTH), draw(same, *rows)]
    values += [draw(same, *drawn.shape, WIDTH), draw(own, *rows)]
    for name, _, _ in drawn.steps:
        if name == "reduce":
            values += [draw(own, WIDTH, INNER), draw(own, INNER, WIDTH)]
    return values


@st.composite
def streams(draw: st.DrawFn) -> Drawn:
    world = draw(st.sampled_from([2, 3, 4]))
    shapes = [
        (2 * world,),
        (1, world),
        (3, 2 * world),
        (world, 3),
        (5,),
        (1, 2 * world - 1),
        (2 * world - 1, 3),
    ]
    names = st.sampled_from(["reduce", "reduce", "reduce", "add", "add", "rms", *STEPS])
    position = st.integers(0, 11)
    # Mostly what was computed last
    late = st.one_of(st.just(-1), st.just(-1), st.just(-2), position)
    steps = draw(st.lists(st.tuples(names, late, late), min_size=3, max_size=12))
    outputs = draw(st.lists(position, max_size=2))
    return Drawn(world, draw(st.sampled_from(shapes)), tuple(steps), tuple(outputs), draw(st.booleans()))

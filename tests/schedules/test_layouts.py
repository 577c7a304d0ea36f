"""What is proven about layouts, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

import autofuse
from autofuse import declarations
from autofuse.passes.schedules.layouts import LOCAL, REPLICATED, UNKNOWN, Input, Layout, Layouts
from tests.passes.harness import fake_group

EVERYONE = frozenset({0, 1, 2, 3})
INPUTS = {
    "same": Input("same", ((EVERYONE, REPLICATED),)),
    "own": Input("own", unlock="declare it"),
    "part": Input("part", ((EVERYONE, Layout("sliced", 0)),)),
}


def total(x: Tensor) -> Tensor:
    return funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD))


PROGRAMS: dict[str, tuple[Callable[..., Tensor], Layout]] = {
    "a declared input": (lambda same, own, part: same + 0, REPLICATED),
    "an input": (lambda same, own, part: own + 0, UNKNOWN),
    "a sum over ranks": (lambda same, own, part: total(own) * 2, REPLICATED),
    "with a declared input": (lambda same, own, part: total(own) + same, REPLICATED),
    "with another input": (lambda same, own, part: total(own) + own, UNKNOWN),
    "with a random mask": (lambda same, own, part: total(own) * torch.rand_like(same), LOCAL),
    "with dropout": (lambda same, own, part: torch.dropout(total(own), 0.5, True), UNKNOWN),
    "gathered": (
        lambda same, own, part: funcol.all_gather_tensor(own, 0, dist.group.WORLD) * 2,
        REPLICATED,
    ),
    "scattered": (
        lambda same, own, part: funcol.reduce_scatter_tensor(own, "sum", 0, dist.group.WORLD) + 0,
        UNKNOWN,
    ),
    "memory that nobody wrote": (lambda same, own, part: torch.empty(4) + total(own), UNKNOWN),
    "a matmul of replicated values": (lambda same, own, part: total(own) @ same, REPLICATED),
    "numbers": (lambda same, own, part: torch.arange(4) + total(own), REPLICATED),
}


def graph_of(fn: Callable[..., Tensor]) -> tuple[fx.GraphModule, dict[fx.Node, Input]]:
    gm = make_fx(fn, tracing_mode="fake")(*(torch.zeros(4, 4) for _ in INPUTS))
    return gm, dict(zip(gm.graph.find_nodes(op="placeholder"), INPUTS.values(), strict=True))


def result_of(gm: fx.GraphModule) -> fx.Node:
    (found,) = gm.graph.output_node().all_input_nodes
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_layout(name: str) -> None:
    program, expected = PROGRAMS[name]
    with fake_group(4):
        gm, inputs = graph_of(program)
        layouts = Layouts(gm.graph, dist.group.WORLD, inputs)
        assert layouts.of(result_of(gm)) == expected


def test_another_group_proves_nothing() -> None:
    with fake_group(4):
        half = dist.new_group([0, 1])
        sums = lambda same, own, part: funcol.wait_tensor(funcol.all_reduce(own, "sum", half)) + 0  # noqa: E731
        gm, inputs = graph_of(sums)
        assert Layouts(gm.graph, dist.group.WORLD, inputs).of(result_of(gm)) == UNKNOWN
        assert Layouts(gm.graph, half, inputs).of(result_of(gm)) == REPLICATED
        # What is the same on all ranks is so on some of them.
        gm, inputs = graph_of(PROGRAMS["a declared input"][0])
        assert Layouts(gm.graph, half, inputs).of(result_of(gm)) == REPLICATED


def test_why_names_the_input_and_the_remedy() -> None:
    with fake_group(4):
        gm, inputs = graph_of(lambda same, own, part: (total(own) + same) * (own - 1))
        layouts = Layouts(gm.graph, dist.group.WORLD, inputs)
        assert layouts.why(result_of(gm)) == "own is unknown: declare it"


def _chunk(rank: int, same: Tensor, own: Tensor, part: Tensor) -> Tensor:
    return total(own) + same.chunk(4)[rank]


def _offset(rank: int, same: Tensor, own: Tensor, part: Tensor) -> Tensor:
    return total(own) * (same > rank * 10)


def _bias(rank: int, same: Tensor, own: Tensor, part: Tensor) -> Tensor:
    return total(own) + (same if rank == 0 else same * 0)


def _table(rank: int, same: Tensor, own: Tensor, part: Tensor) -> Tensor:
    return total(own) + torch.tensor([rank, 1, 2, 3])


def _shape(rank: int, same: Tensor, own: Tensor, part: Tensor) -> Tensor:
    return total(own) + torch.full((4,), float(rank == 1))


@pytest.mark.parametrize("program", [_chunk, _offset, _bias, _table, _shape])
def test_proofs_of_ranks_with_other_constants_differ(program: Callable[..., Tensor]) -> None:
    def proof(rank: int) -> str:
        gm, inputs = graph_of(partial(program, rank))
        layouts = Layouts(gm.graph, dist.group.WORLD, inputs)
        assert layouts.replicated(result_of(gm))
        return layouts.proof([result_of(gm)])

    with fake_group(4):
        assert proof(0) == proof(0)
        assert proof(0) != proof(1)


def test_a_proof_does_not_depend_on_the_device_or_on_other_inputs() -> None:
    def proof(fn: Callable[..., Tensor]) -> str:
        gm, inputs = graph_of(fn)
        return Layouts(gm.graph, dist.group.WORLD, inputs).proof([result_of(gm)])

    with fake_group(4):
        plain = proof(lambda same, own, part: total(own) + torch.ones(4, device="cpu"))
        assert plain == proof(lambda same, own, part: total(own + part) + torch.ones(4, device="cpu"))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.matrix = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, 4))
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor, rest: dict[str, Tensor]) -> Tensor:
        return total(x @ self.matrix) * self.scale + self.table + rest["y"]


def _inputs(model: nn.Module, *args: object) -> dict[str, Layout]:
    """What the backend is told of its inputs, by name, over all ranks."""
    found: dict[str, Layout] = {}

    def backend(gm: fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., object]:
        known = declarations.given(gm, example_inputs).inputs
        found.update({each.name: each.layout(EVERYONE) for each in known})
        return gm.forward

    torch.compile(model, backend=backend)(*args)
    return found


def test_declarations_reach_the_backend() -> None:
    with fake_group(4):
        model, args = Scaled(), (torch.ones(4, 4), {"y": torch.ones(4)})
        assert set(_inputs(model, *args).values()) == {UNKNOWN}
        torch._dynamo.reset()
        autofuse.replicated(model, parameters=["scale", "tab*"], inputs=["rest"])
        other = Scaled()
        found = _inputs(model, *args)
        same = {name for name, layout in found.items() if layout == REPLICATED}
        assert same == {"scale", "table", "L['rest']['y']"}
        torch._dynamo.reset()
        assert set(_inputs(other, *args).values()) == {UNKNOWN}


def test_placements_of_dtensors() -> None:
    with fake_group(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        same = DTensor.from_local(torch.ones(4), mesh, [Shard(0), Replicate()], run_check=False)
        known = {}

        def backend(gm: fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., object]:
            (known["input"],) = declarations.given(gm, example_inputs).inputs
            return gm.forward

        torch.compile(lambda t: t * 2, backend=backend)(same)
        assert known["input"].layout(frozenset({0, 1})) == REPLICATED  # tp
        assert known["input"].layout(frozenset({0, 2})) == Layout("sliced", 0)  # dp
        assert known["input"].layout(EVERYONE) == UNKNOWN


def test_wrong_declarations() -> None:
    with fake_group(4):
        model = Scaled()
        with pytest.raises(ValueError, match="no parameter or buffer of the model matches 'scales'"):
            autofuse.replicated(model, parameters=["scales"])
        with pytest.raises(ValueError, match="check_every=-1"):
            autofuse.replicated(model, check_every=-1)
        with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got Tensor"):
            autofuse.replicated(torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="schedule='slit': expected one of 'auto', 'unchanged', 'every'"):
        autofuse.enable(schedule="slit")
    with pytest.raises(ValueError, match="custom_pass"):
        autofuse.custom_pass(schedule="split")

"""Each rank measures by itself which matmuls Inductor pads. Ranks that pad other matmuls fuse the same sites.

CPUs stand for GPUs: Inductor's check of the device, and ours, are patched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.fx_passes import pad_mm
from torch.nn import functional as F

import autofuse
from autofuse import backend
from autofuse.inspection import explaining
from autofuse.lowering import torch_internals
from autofuse.lowering.torch_internals import padding
from autofuse.passes.report import Report
from tests.passes.harness import fake_group

ODD = 39
"""No multiple of the 4 values to which Inductor pads float32."""
PADDED = torch.ops.aten.constant_pad_nd.default


@contextmanager
def padding_everywhere(faster: Callable[[], bool] = lambda: True) -> Iterator[list[fx.Graph]]:
    """Inside, Inductor pads on CPUs, too, where `faster` says so. The graphs behind our passes."""
    seen: list[fx.Graph] = []

    def noted(graph: fx.Graph) -> None:
        padding.pad_matmuls(graph)
        seen.append(graph)

    with (
        patch.object(pad_mm, "check_device", lambda a, b: True),
        patch.object(pad_mm, "has_triton", lambda: True),
        patch.object(pad_mm, "_should_pad", lambda *given, **named: faster()),
        patch.object(padding, "_on_gpu", lambda node: True),
        patch.object(torch_internals, "pad_matmuls", noted),
    ):
        torch._dynamo.reset()
        yield seen


def pads(graph: fx.Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=PADDED))


def reduced(x: Tensor, w: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    return funcol.all_reduce(x @ w, "sum", "0"), (x @ other).relu()


def _explained(faster: bool) -> tuple[Report, list[fx.Graph]]:
    x, w, other = torch.randn(ODD, 24), torch.randn(24, 16), torch.randn(24, 16)
    with fake_group(2), padding_everywhere(lambda: faster) as seen:
        compiled = torch.compile(reduced, backend="autofuse", options={"policy": "always"})
        with explaining() as report:
            compiled(x, w, other)
    return report, seen


def test_what_is_fused_does_not_depend_on_what_a_rank_measures() -> None:
    (plain, (plain_graph,)), (padded, (padded_graph,)) = _explained(False), _explained(True)
    assert len(plain.fused) == len(padded.fused) == 1
    assert [str(g.after) for g in plain.graphs] == [str(g.after) for g in padded.graphs]
    assert pads(plain_graph) == 0
    assert pads(padded_graph) == 1  # x, for the matmul that no collective reads


def mixed(x: Tensor, w: Tensor, bias: Tensor, stack: Tensor) -> Tensor:
    scaled = torch.addmm(bias, x, w, beta=2.0, alpha=0.5)
    return (F.linear(x, w.t(), bias) + scaled).sin() @ stack[0].t() + torch.bmm(stack, stack.mT).sum()


@pytest.mark.parametrize(
    "option", [None, *(pytest.param(option, marks=pytest.mark.full) for option in (True, False))]
)
def test_results_and_gradients_are_those_of_eager(option: bool | None) -> None:
    """`shape_padding` stays an option. An addmm that scales its terms is left alone."""
    torch.manual_seed(0)
    given = [torch.randn(shape, requires_grad=True) for shape in ((ODD, 10), (10, 7), (7,), (3, 5, 7))]
    options = {} if option is None else {"shape_padding": option}
    with padding_everywhere() as seen:
        compiled = torch.compile(mixed, backend="autofuse", options=options)
        result = compiled(*given)
        found = torch.autograd.grad(result.square().sum(), given)
    wide = [t.detach().double().requires_grad_() for t in given]
    wanted = mixed(*wide)
    gradients = torch.autograd.grad(wanted.square().sum(), wide)
    for value, reference in zip((result, *found), (wanted, *gradients), strict=True):
        assert (value - reference).norm() < 1e-6 * reference.norm()
    forward_and_backward = [pads(graph) for graph in seen]
    assert forward_and_backward == [] if option is False else all(forward_and_backward)


@pytest.mark.parametrize("option", [True, False])
def test_a_custom_pass_warns_of_padding(option: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It runs behind Inductor's padding, and cannot turn it off."""
    backend._warn_of_padding.cache_clear()
    with patch.object(torch.cuda, "is_available", lambda: True), config.patch(shape_padding=option):
        autofuse.custom_pass()(fx.symbolic_trace(torch.nn.Identity()).graph)
    assert ("shape_padding = False" in caplog.text) == option

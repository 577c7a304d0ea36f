"""`autofuse.enable` on GPUs: FlexAttention and a user's Triton kernel beside fused ops."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed import _functional_collectives as funcol

from tests.gpu.expected import group_of_all
from tests.ranks import RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TOKENS, HEADS, DIM = 512, 8, 64
WIDTH = HEADS * DIM


def _attention(x: Tensor, w: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    heads = x.view(1, TOKENS, HEADS, DIM).transpose(1, 2)

    def recent(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(q >= k, score + (k - q) / DIM, -float("inf"))

    attended = flex_attention(heads, heads, heads, score_mod=recent)
    return attended.transpose(1, 2).reshape(TOKENS, WIDTH) @ w


def _doubled(x: Tensor, w: Tensor) -> Tensor:
    from tests.gpu.doubling import doubled

    return doubled(x.sin()) @ w


def _sum(layer: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> Tensor:
    """Sequence parallel: the rows of the sum are shared out, and gathered for the next layer."""
    rows = funcol.reduce_scatter_tensor_autograd(layer(x, w), "sum", 0, group_of_all())
    return funcol.all_gather_tensor_autograd(rows.relu(), 0, group_of_all()) @ w.t()


def _step(rank: int, world: int, name: str, trained: bool) -> tuple[list[str], float]:
    """What is fused, and the error of results and gradients against eager."""
    import autofuse

    torch._dynamo.reset()
    torch.manual_seed(rank)
    layer = {"attention": _attention, "triton": _doubled}[name]
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=trained)
    w = (torch.randn(WIDTH, WIDTH, device="cuda") / WIDTH**0.5).bfloat16().requires_grad_(trained)
    results = []
    with autofuse.enable(policy="always"), autofuse.debug() as report:
        for call in (_sum, torch.compile(_sum, fullgraph=True)):
            y = call(layer, x, w)
            found = [y, *torch.autograd.grad(y.float().square().mean(), (x, w))] if trained else [y]
            results.append([t.detach().double() for t in found])
    errors = [float((a - b).norm() / b.norm()) for b, a in zip(*results, strict=True)]
    return [f"{site.graph.split()[0]} {site.pattern}" for site in report.fused], max(errors)


FORWARD = ["matmul_reduce_scatter", "all_gather_matmul"]


def test_flex_attention(gpu_ranks: Callable[[int], RankPool]) -> None:
    for fused, error in gpu_ranks(2).run(_step, "attention", True, timeout=200):
        assert fused[:2] == [f"forward {op}" for op in FORWARD]
        assert any(site.startswith("backward") for site in fused)
        assert error < 2e-2


def test_a_triton_kernel_of_the_user(gpu_ranks: Callable[[int], RankPool]) -> None:
    for fused, error in gpu_ranks(2).run(_step, "triton", False, timeout=200):
        assert fused == [f"inference {op}" for op in FORWARD]
        assert error < 2e-2

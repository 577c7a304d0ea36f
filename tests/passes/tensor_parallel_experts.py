"""Programs of experts under tensor parallelism: every rank has a part of each, and results are summed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn

from .dense import AR, RS, group
from .harness import Program

EXPERTS, D, H, TOKENS, TOP = 4, 16, 24, 12, 2
COPIED = ("matrices and vectors", "vectors and matrices", "weights and rows", "rows and weights")

Grouped = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Copied(torch.autograd.Function):
    """What all ranks have alike: the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return funcol.all_reduce(grad.contiguous(), "sum", group())


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return funcol.all_reduce(x, "sum", group())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def grouped_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x, w, offs=ends)


def grouped_mm_of_hugging_face(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """What its models call in dtypes other than bfloat16."""
    return torch.ops.transformers.grouped_mm_fallback(x, w, ends)


if not hasattr(torch.ops.torchtitan, "deterministic_scatter_add"):

    @torch.library.custom_op("torchtitan::deterministic_scatter_add", mutates_args=())
    def scatter_add_of_torchtitan(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
        return out.scatter_add(0, index, src)

    @scatter_add_of_torchtitan.register_fake
    def _(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
        return torch.empty_like(out)


class Experts(nn.Module):
    """how: the spelling of the sum over the experts of a token; `scattered`: over the tokens of ranks;
    `shared`: one more expert has every token, and an all_reduce of its own."""

    def __init__(
        self, how: str, scattered: bool = False, grouped: Grouped = grouped_mm, shared: bool = False
    ) -> None:
        super().__init__()
        self.how, self.scattered, self.grouped, self.shared = how, scattered, grouped, shared
        self.gate = nn.Linear(D, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * H, D) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, D, H) * 0.2)

    def act(self, h: Tensor) -> Tensor:
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up

    def copied(self, x: Tensor, w: Tensor) -> Tensor:
        """Every row has the matrix of its expert, as in the batched matmuls of Hugging Face."""
        if self.how == "matrices and vectors":
            return torch.bmm(w, x.unsqueeze(-1)).squeeze(-1)
        return torch.bmm(x.unsqueeze(1), w.mT).squeeze(1)

    def routed(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        if self.how.startswith("every"):
            hot = x.new_zeros(x.shape[0], EXPERTS).scatter(1, chosen, scores.to(x.dtype))
            every = x.expand(EXPERTS, *x.shape)
            out = torch.bmm(self.act(torch.bmm(every, self.up.mT)), self.down.mT)
            if self.how == "every, tokens first":
                return (out.transpose(0, 1) * hot.unsqueeze(-1)).sum(1)
            if self.how == "every, by a matmul":
                return torch.einsum("etd,te->td", out, hot)
            return (out * hot.t().unsqueeze(-1)).sum(0)
        if self.how in (
            "matrices and vectors",
            "vectors and matrices",
            "weights and rows",
            "rows and weights",
        ):
            copies, rows = chosen.view(-1), x.repeat_interleave(TOP, 0)
            out = self.copied(self.act(self.copied(rows, self.up[copies])), self.down[copies])
            weights = scores.to(x.dtype)
            if self.how == "weights and rows":
                return (weights.unsqueeze(1) @ out.view(-1, TOP, D)).squeeze(1)
            if self.how == "rows and weights":
                return torch.einsum("tkd,tk->td", out.view(-1, TOP, D), weights)
            return (out * scores.view(-1, 1)).view(-1, TOP, D).sum(1).to(x.dtype)
        experts, order = torch.sort(chosen.view(-1))
        token, score = order // TOP, scores.view(-1)[order]
        ends = torch.histc(experts.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)
        h = self.act(self.grouped(x[token], self.up.mT, ends))
        out = self.grouped(h, self.down.mT, ends)
        if self.how == "biased and masked":  # as experts of other ranks are: the backward reads the rows left
            mine = (experts < EXPERTS // 2).unsqueeze(-1)
            out = torch.where(mine, out + self.down.mean(-1)[experts], 0.0)
        out = out * score.unsqueeze(-1)
        if self.how == "index_add":
            return torch.zeros_like(x).index_add(0, token, out.to(x.dtype))
        if self.how == "scatter_add":
            return torch.zeros_like(x).scatter_add(0, token.unsqueeze(-1).expand(-1, D), out.to(x.dtype))
        if self.how == "scatter_add of torchtitan":
            index = token.unsqueeze(-1).expand(-1, D)
            return torch.ops.torchtitan.deterministic_scatter_add(torch.zeros_like(x), index, out.to(x.dtype))
        if self.how == "index_put from the end":
            return torch.zeros_like(x).index_put((token - TOKENS,), out.to(x.dtype), accumulate=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=x.device)
        if self.how == "sum from the end":
            back = torch.where(back % 2 == 1, back - TOP * TOKENS, back)
        return out[back].view(-1, TOP, D).sum(1).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x = _Copied.apply(x)
        scores, chosen = self.gate(x).float().softmax(-1).topk(TOP, -1)
        out = self.routed(x, scores / scores.sum(-1, keepdim=True), chosen)
        if self.shared:
            every = F.silu(x @ self.up[0].mT).narrow(-1, 0, H) @ self.down[0].mT
            return _Summed.apply(out) + _Summed.apply(every)
        if self.scattered:
            if out.requires_grad:
                return funcol.reduce_scatter_tensor_autograd(out, "sum", 0, group()).relu()
            return funcol.reduce_scatter_tensor(out, "sum", 0, group()).relu()
        return (_Summed.apply(out) if out.requires_grad else funcol.all_reduce(out, "sum", group())).relu()


def build(
    how: str, dtype: torch.dtype = torch.bfloat16, scattered: bool = False, grad: bool = False,
    grouped: Grouped = grouped_mm, shared: bool = False,
) -> Callable[[int, int], tuple[Callable[..., Any], tuple[Any, ...]]]:  # fmt: skip
    def make(world: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if grouped is grouped_mm_of_hugging_face:
            importlib.import_module("transformers.integrations.moe")  # defines its op
        torch.manual_seed(rank)
        model = Experts(how, scattered, grouped, shared).to(dtype)
        torch.manual_seed(0)
        with torch.no_grad():
            model.gate.weight.normal_()
        return model, (torch.randn(TOKENS, D, dtype=dtype, requires_grad=grad),)

    return make


def gathered(x: Tensor, w: Tensor) -> Tensor:
    """Tokens that ranks gather, whose rows are no rows of the matmul."""
    return funcol.all_gather_tensor(torch.bmm(x, w).sum(0), 0, group()).relu()


def added_twice(
    x: Tensor, w: Tensor, more_x: Tensor, more_w: Tensor, scattered: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows of two matmuls, one for each token, whose tokens are also read where they are not summed."""
    rows = (torch.bmm(x, w) + torch.bmm(more_x, more_w)).flatten(0, 1)
    tokens = x.new_zeros(rows.shape).index_add(0, scattered, rows)
    return funcol.all_reduce(tokens, "sum", group()).relu(), tokens.sin()


def given_twice(world: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    sizes = (2, TOKENS, D), (2, D, H), (2, TOKENS, D), (2, D, H)
    return added_twice, (*map(torch.randn, sizes), torch.arange(2 * TOKENS).flip(0))


def given(world: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return gathered, (torch.randn(2, TOKENS, D), torch.randn(2, D, H))


PROGRAMS: dict[str, Program] = {
    "sum over top k": Program(build("sum"), {"inference": [AR]}, tolerance=0.02, worlds=(2, 4)),
    "matrices and vectors": Program(
        build("matrices and vectors", torch.float32), {"inference": [AR]}, worlds=(2, 4)
    ),
    "matrices and vectors, training": Program(
        build("matrices and vectors", torch.float32, grad=True),
        {"forward": [AR], "backward": [AR]},
        grad=True,
    ),
    "vectors and matrices, scattered": Program(
        build("vectors and matrices", scattered=True), {"inference": [RS]}, tolerance=0.02
    ),
    "weights and rows": Program(build("weights and rows"), {"inference": [AR]}, tolerance=0.02),
    "rows and weights, scattered": Program(
        build("rows and weights", torch.float32, scattered=True), {"inference": [RS]}
    ),
    "rows and weights, training": Program(
        build("rows and weights", torch.float32, grad=True), {"forward": [AR], "backward": [AR]}, grad=True
    ),
    "a shared expert": Program(build("sum", shared=True), {"inference": [AR, AR]}, tolerance=0.02),
    "a shared expert, training": Program(
        build("sum", grad=True, shared=True),
        {"forward": [AR, AR], "backward": [AR]},
        grad=True,
        tolerance=0.03,
    ),
    "a shared expert beside index_add": Program(
        build("index_add", shared=True), {"inference": [AR, AR]}, tolerance=0.02
    ),
    "index_add": Program(build("index_add"), {"inference": [AR]}, tolerance=0.02),
    "scatter_add, scattered": Program(
        build("scatter_add", scattered=True), {"inference": [RS]}, tolerance=0.02
    ),
    "scatter_add of torchtitan, scattered": Program(
        build("scatter_add of torchtitan", scattered=True), {"inference": [RS]}, tolerance=0.02
    ),
    "grouped matmuls of Hugging Face": Program(
        build("sum", torch.float32, grouped=grouped_mm_of_hugging_face), {"inference": [AR]}
    ),
    "grouped matmuls of Hugging Face, training": Program(
        build("sum", torch.float32, grad=True, grouped=grouped_mm_of_hugging_face),
        {"forward": [AR], "backward": [AR]},
        grad=True,
    ),
    "sum, rows from the end": Program(build("sum from the end"), {"inference": [AR]}, tolerance=0.02),
    "index_put, tokens from the end": Program(
        build("index_put from the end"), {"inference": [AR]}, tolerance=0.02
    ),
    "every expert": Program(build("every", torch.float32), {"inference": [AR]}),
    "every expert, tokens first": Program(build("every, tokens first", torch.float32), {"inference": [AR]}),
    "every expert, by a matmul": Program(build("every, by a matmul", torch.float32), {"inference": [AR]}),
    "gathered": Program(given, kept={"inference": ["unsupported_variant"]}),
    "tokens of two matmuls are read": Program(given_twice, kept={"inference": ["extra_users"]}),
    "training": Program(
        build("sum", grad=True), {"forward": [AR], "backward": [AR]}, grad=True, tolerance=0.03
    ),
    "biased and masked, training": Program(
        build("biased and masked", grad=True), {"forward": [AR], "backward": [AR]}, grad=True, tolerance=0.03
    ),
    "index_add, scattered, training": Program(
        build("index_add", scattered=True, grad=True),
        {"forward": [RS], "backward": [AR]},
        {"backward": ["no_compute"]},
        grad=True,
        tolerance=0.03,
    ),
    "every expert, training": Program(
        build("every", torch.float32, grad=True), {"forward": [AR], "backward": [AR]}, grad=True
    ),
}

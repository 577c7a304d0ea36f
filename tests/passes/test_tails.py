"""Tails: which stages behind a reduction its op takes, and that the bits stay those of the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import autofuse
from autofuse.passes.report import Site
from tests.subsets import in_tiers

from .chains import ReduceBackward, ReduceForward
from .dense import group
from .harness import fake_group, passes_only

N = 16
Norm = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _with_tails() -> Iterator[None]:
    with autofuse.config.patch(schedule="every"):
        yield


def linear_sum(x: Tensor, w: Tensor) -> Tensor:
    """A row-parallel linear; with a gradient where one is asked for."""
    y = F.linear(x, w)
    return ReduceForward.apply(y, "sum") if y.requires_grad else funcol.all_reduce(y, "sum", group())


# --- norms as models spell them -----------------------------------------------------------------------


def rms_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """torchtitan's."""
    return F.rms_norm(x, (N,), w, 1e-5)


def llama(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """LlamaRMSNorm and MistralRMSNorm: rounded before gamma."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * wide.to(x.dtype)


def gemma(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """GemmaRMSNorm: times gamma + 1, rounded behind it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide * (1.0 + w.float())).type_as(x)


def squares(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """x * x, and the scale on the left."""
    wide = x.float()
    return (torch.rsqrt((wide * wide).mean(2, keepdim=True) + 0.5) * wide).to(x.dtype)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """BertSelfOutput's."""
    return F.layer_norm(x, (N,), w, b, 1e-12)


NORMS = {
    rms_norm: "rms 9.999999747378752e-06{keep}; mul %1{bf16}",
    llama: "rms 1e-06{keep}{bf16}; mul %1",
    gemma: "rms 1e-06{keep}; mul %1{bf16}",
    squares: "rms 0.5{keep}{bf16}",
    layer_norm: "standardize 1e-12{keep}; mul %1; add %2{bf16}",
}


@in_tiers(norm=NORMS, dtype=[torch.float32, torch.bfloat16], training=[False, True])
def test_norms(norm: Norm, dtype: torch.dtype, training: bool) -> None:
    def fn(x: Tensor, a: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        r = r + linear_sum(x, a)
        return norm(r, w, b), r

    shapes = (2, 8, 12), (N, 12), (2, 8, N), (N,), (N,)
    narrow = dtype != torch.float32
    words = NORMS[norm].format(keep=" keep" * training, bf16="; to bfloat16" * narrow)
    (site,) = check(fn, *arguments(*shapes, dtype=dtype, grad=training))
    assert site.tail == "add %0; keep; " + "to float32; " * narrow + words


# --- the backward of norms ----------------------------------------------------------------------------

BACKWARD = {
    rms_norm: "{wide}mul %0; project %1 %2; mul %3; add %4",
    llama: "mul %0; {wide}project %1 %2; mul %3; add %4",
    layer_norm: "{wide}mul %0; centre %1; mul 16; mul %2; add %3",
}


@in_tiers(norm=BACKWARD, dtype=[torch.float32, torch.bfloat16])
def test_backward_of_norms(norm: Norm, dtype: torch.dtype) -> None:
    """A block before a column-parallel linear, whose gradient is reduced: as Llama and BERT have it."""

    def fn(x: Tensor, a: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return x * 2 + F.linear(ReduceBackward.apply(norm(x, w, b)), a)

    results = []
    with fake_group(4):
        for policy in ("never", "always"):
            torch._dynamo.reset()
            own = arguments((2, 8, N), (N, N), (N,), (N,), dtype=dtype, grad=True)
            with autofuse.debug() as report:
                torch.compile(fn, backend=passes_only(policy))(*own).cos().sum().backward()
            results.append([t.grad for t in own if t.grad is not None])
    (site,) = report.fused
    narrow = dtype != torch.float32
    kept = "keep; " * (norm is llama or not narrow)
    words = BACKWARD[norm].format(wide="to float32; " * narrow)
    if narrow:
        if not kept:
            words = words.replace("to float32; ", "to float32; keep; ")
        words = words.replace("; add", "; to bfloat16; add")
    assert site.tail == kept + words, site.tail
    rtol = 1e-5 if dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(results[1], results[0], rtol=rtol, atol=rtol)


def rms_backward(
    g: Tensor, x: Tensor, r: Tensor, dim: int = -1, columns: int = N
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of an RMSNorm of x, as torch decomposes it, and what stands inside."""
    product = g * x
    total = product.sum(dim, keepdim=True)
    shift = total.mul(-0.5).mul(r.pow(3)) / columns * (x * 2.0)
    return g * r + shift, total, shift, product


def layer_backward(g: Tensor, x: Tensor) -> Tensor:
    """That of a LayerNorm whose normed value is x; here x has any mean."""
    return g * N - g.sum(-1, keepdim=True) - x * (g * x).sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("fn", "tail"),
    [
        (lambda g, x, v: rms_backward(g, x, v[:1])[0], "project %0 %1; mul %2"),
        (lambda g, x, v: rms_backward(g, x, x[..., :1])[0], "project %0 %1; mul %2"),
        (lambda g, x, v: rms_backward(g, x, v)[0], ""),
        (lambda g, x, v: rms_backward(g, x, x)[0], ""),
        (lambda g, x, v: rms_backward(g, x, v[:1], dim=1)[0], ""),
        (lambda g, x, v: rms_backward(g, x, v[:1], columns=8)[0], ""),
        (lambda g, x, v: rms_backward(g, x, v[:1])[:2], ""),
        (lambda g, x, v: rms_backward(g, x, v[:1])[::2], ""),
        (lambda g, x, v: rms_backward(g, x, v[:1])[::3], ""),
        (lambda g, x, v: layer_backward(g, x), f"centre %0; mul {N}"),
    ],
    ids=[
        "rms", "a scale of rows", "a scale of columns", "a scale of elements", "over tokens",
        "another divisor", "sum read", "shift read", "product read", "layer",
    ],
)  # fmt: skip
def test_what_is_a_backward_of_a_norm(fn: Callable[..., Any], tail: str) -> None:
    """Of any x: that x is a norm's input, or its result, is not to be seen in a backward graph."""

    def call(y: Tensor, a: Tensor, x: Tensor, v: Tensor) -> Any:
        return fn(funcol.all_reduce(F.linear(y, a), "sum", group()), x, v)

    given, results = arguments((2, 8, 12), (N, 12), (2, 8, N), (N,)), []
    with fake_group(4), torch.no_grad(), autofuse.debug() as report:
        for policy in ("never", "always"):
            torch._dynamo.reset()
            results.append(torch.compile(call, backend=passes_only(policy))(*given))
    assert [site.tail for site in report.fused] == [tail]
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


# --- what is absorbed, and what is not ----------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """`fn(y, r, v)`: y: [2, 8, N] is the sum, r: [2, 8, N], v: [N]."""

    fn: Callable[[Tensor, Tensor, Tensor], Any]
    tail: str
    end: str = ""


def normed(x: Tensor, eps: Any = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def standardized(x: Tensor, correction: int) -> Tensor:
    var, mean = torch.var_mean(x, -1, correction=correction, keepdim=True)
    return (x - mean) * torch.rsqrt(var + 1)


def in_place(y: Tensor, r: Tensor, v: Tensor) -> Tensor:
    r.add_(y)
    return normed(r)


def padded(y: Tensor, r: Tensor, v: Tensor) -> Tensor:
    """Positions as a mask of rows."""
    return normed((y + r).masked_fill(r[:, :, :1] > 0, 0.25))


CASES = {
    "a residual alone": Case(lambda y, r, v: (y + r).sum(), "add %0"),
    "a bias, a cast and a scale are left": Case(lambda y, r, v: (y + v).double() * 2, "", "neither a norm"),
    "all stages": Case(
        lambda y, r, v: torch.where(r > 0, -(2 - (y - r) / 3).relu() * v, r),
        "sub %0; div 3; rsub 2; relu; neg; mul %1; where %2 %3",
    ),
    "the reduced value is returned, too": Case(lambda y, r, v: (y, normed(y + r)), "keep; add %0; rms 1e-06"),
    "the normed value is returned, too": Case(
        lambda y, r, v: (n := normed(y + r), n * v), "add %0; rms 1e-06; keep; mul %1"
    ),
    "the statistics are returned, too": Case(
        lambda y, r, v: (s := torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1), y * s * v, y),
        "keep; rms 1 keep; mul %0",
    ),
    "a view is returned, too": Case(
        lambda y, r, v: ((s := y + r).view(-1, 4), normed(s)), "add %0; keep; rms 1e-06"
    ),
    "norms of two eps": Case(lambda y, r, v: (normed(s := y + r), normed(s, 1)), "add %0", "several norms"),
    "two norms that differ in gamma": Case(
        lambda y, r, v: ((n := normed(y + r)) * v, n * (v + 1)), "add %0; rms 1e-06"
    ),
    "two norms, one behind the other": Case(
        lambda y, r, v: normed(normed(y) * v + r), "rms 1e-06; mul %0; add %1; rms 1e-06"
    ),
    "two ways to a norm": Case(
        lambda y, r, v: (normed(y + r), normed(y - r)), "", "neither a norm"
    ),
    "an operand made of the sum": Case(
        lambda y, r, v: normed(y * y.sum(0, keepdim=True)), "", "read getitem"
    ),
    "the sum with itself": Case(lambda y, r, v: normed(y + y), "", "the sum itself"),
    "an operand that is computed later": Case(
        lambda y, r, v: (y + (r @ r.mT @ r).tanh()), "add %0"
    ),
    "an operand behind a later collective": Case(
        lambda y, r, v: normed(y + funcol.all_reduce(r, "sum", group())), "", "later collective"
    ),
    "an alpha": Case(lambda y, r, v: torch.add(y, r, alpha=2), "", "no stage"),
    "a larger residual": Case(lambda y, r, v: y + r.unsqueeze(1), "", "changes the shape"),
    "a residual that is broadcast": Case(lambda y, r, v: y + r[:1], "add %0"),
    "a residual in place": Case(in_place, "add %0; keep; rms 1e-06"),
    "integers": Case(lambda y, r, v: (y + r).to(torch.int32) + 1, "add %0", "no stage"),
    "float64": Case(lambda y, r, v: y + r.double(), "", "no stage"),
    "a mask of rows": Case(padded, "add %0; masked_fill %1 0.25; rms 1e-06"),
    "numbers that are not finite": Case(
        lambda y, r, v: (y + r).masked_fill(r > 0, -torch.inf) * torch.nan,
        "add %0; masked_fill %1 -inf; mul nan",
    ),
    "a static quantisation": Case(
        lambda y, r, v: ((normed(y + r) * v).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)),
        "add %0; rms 1e-06; mul %1; clamp_min -448; clamp_max 448; to float8_e4m3fn", "no stage",
    ),
    "what is quantised is read as a float": Case(
        lambda y, r, v: (y + r).to(torch.float8_e5m2).float().clamp(max=v[0]) * 2,
        "add %0; to float8_e5m2; to float32", "no stage",
    ),
    "a norm over tokens": Case(lambda y, r, v: y * torch.rsqrt(y.pow(2).mean(1, keepdim=True) + 1), ""),
    "a norm over both": Case(lambda y, r, v: F.layer_norm(y, (8, N)), ""),
    "a norm of heads": Case(lambda y, r, v: normed(y.view(2, 8, 4, 4)), ""),
    "a norm of rows that are viewed": Case(lambda y, r, v: normed(y.view(4, 4, N)), "rms 1e-06"),
    "another divisor": Case(
        lambda y, r, v: y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) / (N - 1) + 1), ""
    ),
    "Bessel's correction": Case(lambda y, r, v: standardized(y, 1), ""),
    "no correction": Case(lambda y, r, v: standardized(y, 0), "standardize 1"),
    "rows are scaled as columns": Case(
        lambda y, r, v: (y := y.view(N, N)) * torch.rsqrt(y.pow(2).mean(-1) + 1), ""
    ),
    "eps that is a tensor": Case(lambda y, r, v: normed(y, v[0]), ""),
    "cubes": Case(lambda y, r, v: y * torch.rsqrt(y.pow(3).mean(-1, keepdim=True) + 9), ""),
    "no keepdim": Case(lambda y, r, v: y * torch.rsqrt(y.pow(2).mean(-1) + 1)[..., None], ""),
    "a mean that is returned, too": Case(
        lambda y, r, v: (m := y.pow(2).mean(-1, keepdim=True), y * torch.rsqrt(m + 1)), ""
    ),
    "the scale of another value": Case(
        lambda y, r, v: r * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1), ""
    ),
    "transposed": Case(lambda y, r, v: y.mT + r.mT, "", "changes the shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    case = CASES[name]

    def fn(x: Tensor, a: Tensor, r: Tensor, v: Tensor) -> Any:
        return case.fn(funcol.all_reduce(F.linear(x, a), "sum", group()), r, v)

    site = check(fn, *arguments((2, 8, 12), (N, 12), (2, 8, N), (N,)))[0]
    assert (site.tail, case.end in site.tail_end) == (case.tail, True), site.tail_end


@pytest.mark.parametrize("in_order", [False, True], ids=["by seeds", "in the order of eager torch"])
def test_dropout(in_order: bool) -> None:
    """BertSelfOutput. The mask is drawn before the op, unless draws must keep their order."""

    def fn(x: Tensor, a: Tensor, r: Tensor, w: Tensor) -> Tensor:
        y = linear_sum(x, a)
        return F.layer_norm(y * (torch.rand(2, 8, N) > 0.25) * 1.25 + r, (N,), w)

    with torch._inductor.config.patch(fallback_random=in_order):
        (site,) = check(fn, *arguments((2, 8, 12), (N, 12), (2, 8, N), (N,), grad=True))
    if in_order:
        assert (site.tail, site.tail_end.endswith("which cannot move")) == ("", True), site.tail_end
    else:
        # The backward reads what lies between the norm and its weight.
        norm = "standardize 1e-05 keep; keep; mul %2"
        assert site.tail == f"mul %0; mul 1.25; add %1; {norm}"


def test_views_between() -> None:
    """Rows are tokens, then [B, S, N], of sizes that are not known; the residual is flat."""

    def fn(x: Tensor, a: Tensor, r: Tensor) -> Tensor:
        y = funcol.all_reduce(F.linear(x.flatten(0, 1), a), "sum", group())
        y = (y + r.flatten(0, 1)).view(x.shape[0], x.shape[1], N)
        return y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6) * 2

    (site,) = check(fn, *arguments((3, 5, 12), (N, 12), (3, 5, N)), dynamic=True)
    assert site.tail == "add %0; rms 1e-06; mul 2"


@pytest.mark.parametrize(("operand", "tail"), [((1, 1, N), "add %0"), ((N,), "")], ids=["residual", "bias"])
def test_one_row(operand: tuple[int, ...], tail: str) -> None:
    def fn(x: Tensor, a: Tensor, r: Tensor) -> Tensor:
        return funcol.all_reduce(F.linear(x, a), "sum", group()) + r

    (site,) = check(fn, *arguments((1, 1, 12), (N, 12), operand))
    assert site.tail == tail


@pytest.mark.parametrize(("dim", "tail"), [(0, "add %0; rms 1e-06"), (1, "add %0; rms 1e-06"), (2, "add %0")])
def test_parts(dim: int, tail: str) -> None:
    """A part has whole rows unless columns were scattered."""

    def fn(x: Tensor, a: Tensor, r: Tensor) -> Tensor:
        return normed(funcol.reduce_scatter_tensor(F.linear(x, a), "avg", dim, group()) + r)

    shape = [4, 8, N]
    shape[dim] //= 4
    with fake_group(4), torch.no_grad(), autofuse.debug() as report:
        torch.compile(fn, backend=passes_only())(*arguments((4, 8, 12), (N, 12), tuple(shape)))
    assert [site.tail for site in report.sites] == [tail]


@pytest.mark.parametrize(
    ("last", "end"),
    [(lambda y, v: y * v, "memory changes before mul"), (lambda y, v: normed(y), "pow_1, mul read add")],
    ids=["a stage", "a norm"],
)
def test_memory_that_changes(last: Callable[[Tensor, Tensor], Tensor], end: str) -> None:
    """A weight that is overwritten behind the op must be read where it is read."""

    def fn(x: Tensor, a: Tensor, r: Tensor, v: Tensor) -> Tensor:
        y = funcol.all_reduce(torch.mm(x, a), "sum", group()) + r
        v.copy_(r[0])
        return last(y, v)

    args = arguments((8, 12), (12, N), (8, N), (N,))
    with fake_group(4), torch.no_grad(), autofuse.config.patch(policy="always"):
        expected = fn(*(a.clone() for a in args))
        gm = make_fx(fn, tracing_mode="fake")(*args)
        (site,) = autofuse.rewrite(gm).sites
        assert (site.tail, site.tail_end) == ("add %0", end)
        torch.testing.assert_close(gm(*args), expected)


def arguments(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, grad: bool = False
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad) for shape in shapes]


def check(fn: Callable[..., Any], *args: Tensor, dynamic: bool | None = None) -> list[Site]:
    """The reductions of a function whose rewritten graphs yield the bits of the graphs as they were.

    The ranks of the group are made up: its sums are their terms. Gradients and inputs are compared, too.
    """
    grad = any(a.requires_grad for a in args)
    found = []
    with fake_group(4), torch.set_grad_enabled(grad), autofuse.debug() as report:
        for policy in ("never", "always"):
            torch._dynamo.reset()
            torch.manual_seed(0)
            call = torch.compile(fn, backend=passes_only(policy), dynamic=dynamic)
            own = [a.detach().clone().requires_grad_(grad) for a in args]
            out = call(*own)
            results = [out] if isinstance(out, Tensor) else list(out)
            if grad:
                sum((o * (i + 1)).float().sum() for i, o in enumerate(results)).backward()
                results += [a.grad for a in own if a.grad is not None]
            found.append([r.detach() for r in (*results, *own)])  # own: what was changed in place
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0, equal_nan=True)
    return [site for site in report.fused if site.pattern != "all_gather_matmul"]

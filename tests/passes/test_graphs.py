"""Graphs after the rewrite, node by node. `EXPECTTEST_ACCEPT=1 pytest` writes them anew."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, fx

from autofuse.backend import fusion_pass
from autofuse.lowering import torch_internals
from autofuse.options import settings

from .dense import group
from .harness import fake_group
from .tensor_parallel_experts import build


def rewritten(fn: Callable[..., Any], *args: Any, policy: str = "always", schedule: str = "auto") -> str:
    """One line a node of the inference graph of `fn` under a fake group of 4."""
    lines: list[str] = []

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        _fusion, patches = fusion_pass(0, settings(policy=policy, schedule=schedule))

        def compile_graph(gm: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
            torch_internals.run_post_grad_passes(gm, example_inputs, kwargs.get("is_inference", False))
            _number_placeholders(gm.graph)
            lines.extend(_line(node) for node in gm.graph.nodes if node.op != "placeholder")
            return lambda inputs: [torch.zeros(1)]

        torch_internals.compile_fx(gm, example_inputs, compile_graph, patches)
        return gm.forward

    with fake_group(4), torch.no_grad():
        torch.compile(fn, backend=backend)(*args)
    return "\n".join(lines)


def _number_placeholders(graph: fx.Graph) -> None:
    """By who reads them first: releases of torch have them in different orders."""
    read = dict.fromkeys(i for n in graph.nodes for i in n.all_input_nodes if i.op == "placeholder")
    for number, node in enumerate(read):
        node.name = f"arg{number}"


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    val = node.meta.get("val")
    shape = list(val.shape) if isinstance(val, torch.Tensor) else ""
    target = node.target if isinstance(node.target, torch._ops.OpOverload) else node.target.__name__
    text = ", ".join(map(repr, node.args))
    text = re.sub(r"'[^']*\.py:\d+'", "SITE", text)
    return f"{node.name}: {shape} = {target}({text})"


def test_matmul_all_reduce() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return funcol.all_reduce(F.linear(x, w, b).bfloat16(), "sum", group()).float() + x.sum()

    assert_expected_inline(
        rewritten(fn, torch.zeros(2, 8, 12), torch.zeros(16, 12), torch.zeros(16)),
        """\
view: [16, 12] = aten.reshape.default(arg0, [16, 12])
permute: [12, 16] = aten.permute.default(arg1, [1, 0])
matmul_all_reduce_default:  = autofuse.matmul_all_reduce.default([view], [permute], [arg2], 'addmm %0; to bfloat16', 'sum', False, [], '', '', '0', 'direct', SITE)
getitem: [16, 16] = getitem(matmul_all_reduce_default, 0)
reshape_default: [2, 8, 16] = aten.reshape.default(getitem, [2, 8, 16])
convert_element_type_1: [2, 8, 16] = prims.convert_element_type.default(reshape_default, torch.float32)
sum_1: [] = aten.sum.default(arg0)
add: [2, 8, 16] = aten.add.Tensor(convert_element_type_1, sum_1)
return (add,)""",
    )


def test_residual_and_rms_norm() -> None:
    def fn(x: Tensor, a: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        r = r + funcol.all_reduce(F.linear(x, a), "sum", group())
        wide = r.float()
        return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16(), r

    assert_expected_inline(
        rewritten(
            fn,
            *(torch.zeros(s, dtype=torch.bfloat16) for s in ((2, 8, 12), (16, 12), (2, 8, 16), (16,))),
            schedule="every",
        ),
        """\
view: [16, 12] = aten.reshape.default(arg0, [16, 12])
permute: [12, 16] = aten.permute.default(arg1, [1, 0])
reshape_default_1: [16, 16] = aten.reshape.default(arg2, [16, 16])
matmul_all_reduce_default_1:  = autofuse.matmul_all_reduce.default([view], [permute], [], 'mm', 'sum', False, [reshape_default_1, arg3], 'add %0; keep; to float32; rms 1e-06; to bfloat16; mul %1', '', '0', 'direct', SITE)
getitem_1: [16, 16] = getitem(matmul_all_reduce_default_1, 0)
reshape_default_2: [2, 8, 16] = aten.reshape.default(getitem_1, [2, 8, 16])
getitem_2: [16, 16] = getitem(matmul_all_reduce_default_1, 1)
reshape_default_3: [2, 8, 16] = aten.reshape.default(getitem_2, [2, 8, 16])
return (reshape_default_2, reshape_default_3)""",
    )


def test_matmul_reduce_scatter_on_dim_1() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, w)
        return funcol.reduce_scatter_tensor(y, "avg", 1, group()), y

    assert_expected_inline(
        rewritten(fn, torch.zeros(2, 8, 12), torch.zeros(16, 12)),
        """\
view: [16, 12] = aten.reshape.default(arg0, [16, 12])
permute: [12, 16] = aten.permute.default(arg1, [1, 0])
matmul_reduce_scatter_default:  = autofuse.matmul_reduce_scatter.default([view], [permute], [], 'mm', 'avg', 0, 2, True, [], '', '', '0', 'direct', SITE)
getitem_5: [16, 16] = getitem(matmul_reduce_scatter_default, 1)
view_1: [2, 8, 16] = aten.reshape.default(getitem_5, [2, 8, 16])
getitem_4: [4, 16] = getitem(matmul_reduce_scatter_default, 0)
reshape_default: [2, 2, 16] = aten.reshape.default(getitem_4, [2, 2, 16])
return (reshape_default, view_1)""",
    )


def test_all_gather_matmul_of_three() -> None:
    def fn(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        # As all_gather_tensor does it on dim 1, where torch before 2.13 breaks the graph.
        whole = torch.cat(funcol.all_gather_tensor(x, 0, group()).chunk(4), 1)
        return F.linear(whole, q), F.linear(whole, k), F.linear(whole, v) + whole.sum()

    assert_expected_inline(
        rewritten(fn, torch.zeros(2, 3, 12), torch.zeros(16, 12), torch.zeros(8, 12), torch.zeros(8, 12)),
        """\
reshape_default: [6, 12] = aten.reshape.default(arg0, [6, 12])
permute: [12, 16] = aten.permute.default(arg1, [1, 0])
permute_1: [12, 8] = aten.permute.default(arg2, [1, 0])
permute_2: [12, 8] = aten.permute.default(arg3, [1, 0])
all_gather_matmul_default:  = autofuse.all_gather_matmul.default(reshape_default, [permute, permute_1, permute_2], [], 0, 2, True, '0', 'direct', SITE)
getitem_4: [24, 12] = getitem(all_gather_matmul_default, 3)
reshape_default_1: [2, 12, 12] = aten.reshape.default(getitem_4, [2, 12, 12])
getitem_5: [24, 16] = getitem(all_gather_matmul_default, 0)
getitem_6: [24, 8] = getitem(all_gather_matmul_default, 1)
getitem_7: [24, 8] = getitem(all_gather_matmul_default, 2)
view_1: [2, 12, 16] = aten.reshape.default(getitem_5, [2, 12, 16])
view_3: [2, 12, 8] = aten.reshape.default(getitem_6, [2, 12, 8])
view_5: [2, 12, 8] = aten.reshape.default(getitem_7, [2, 12, 8])
sum_1: [] = aten.sum.default(reshape_default_1)
add: [2, 12, 8] = aten.add.Tensor(view_5, sum_1)
return (view_1, view_3, add)""",
    )


def test_masked_sum_of_matmuls() -> None:
    def fn(x: Tensor, w: Tensor, a: Tensor, b: Tensor, keep: Tensor) -> Tensor:
        y = F.linear(x, w) + F.linear(F.linear(x, a), b) * 0.5
        return funcol.all_reduce(y.masked_fill(~keep, 0), "sum", group())

    args = (torch.zeros(16, 12), torch.zeros(2, 12), torch.zeros(16, 2), torch.ones(2, 8, 1).bool())
    assert_expected_inline(
        rewritten(fn, torch.zeros(2, 8, 12), *args),
        """\
bitwise_not: [2, 8, 1] = aten.bitwise_not.default(arg0)
view: [16, 12] = aten.reshape.default(arg1, [16, 12])
permute: [12, 16] = aten.permute.default(arg2, [1, 0])
view_2: [16, 12] = aten.reshape.default(arg1, [16, 12])
permute_1: [12, 2] = aten.permute.default(arg3, [1, 0])
mm_1: [16, 2] = aten.mm.default(view_2, permute_1)
permute_2: [2, 16] = aten.permute.default(arg4, [1, 0])
mm_2: [16, 16] = aten.mm.default(mm_1, permute_2)
view_5: [2, 8, 16] = aten.reshape.default(mm_2, [2, 8, 16])
mul: [2, 8, 16] = aten.mul.Tensor(view_5, 0.5)
reshape_default: [16, 16] = aten.reshape.default(mul, [16, 16])
reshape_default_1: [16, 1] = aten.reshape.default(bitwise_not, [16, 1])
matmul_all_reduce_default:  = autofuse.matmul_all_reduce.default([view], [permute], [reshape_default, reshape_default_1], 'mm; add %0; masked_fill %1 0.0', 'sum', False, [], '', '', '0', 'direct', SITE)
getitem: [16, 16] = getitem(matmul_all_reduce_default, 0)
reshape_default_2: [2, 8, 16] = aten.reshape.default(getitem, [2, 8, 16])
return (reshape_default_2,)""",
    )


def test_reductions_that_are_added() -> None:
    def fn(x: Tensor, w: Tensor, v: Tensor, residual: Tensor) -> Tensor:
        first = funcol.reduce_scatter_tensor(F.linear(x, w), "sum", 1, group())
        return residual + first + funcol.reduce_scatter_tensor(F.linear(x.relu(), v), "sum", 1, group())

    args = (torch.zeros(16, 12), torch.zeros(16, 12), torch.zeros(2, 2, 16))
    assert_expected_inline(
        rewritten(fn, torch.zeros(2, 8, 12), *args),
        """\
view: [16, 12] = aten.reshape.default(arg0, [16, 12])
permute: [12, 16] = aten.permute.default(arg1, [1, 0])
relu: [2, 8, 12] = aten.relu.default(arg0)
view_2: [16, 12] = aten.reshape.default(relu, [16, 12])
permute_1: [12, 16] = aten.permute.default(arg2, [1, 0])
matmul_reduce_scatter_default_2:  = autofuse.matmul_reduce_scatter.default([view, view_2], [permute, permute_1], [], 'mm', 'sum', 0, 2, False, [], '', '', '0', 'direct', SITE)
getitem_10: [4, 16] = getitem(matmul_reduce_scatter_default_2, 0)
reshape_default_1: [2, 2, 16] = aten.reshape.default(getitem_10, [2, 2, 16])
add_1: [2, 2, 16] = aten.add.Tensor(arg3, reshape_default_1)
return (add_1,)""",
    )


def test_a_sum_that_is_read_twice_is_merged() -> None:
    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        first = funcol.all_reduce(F.linear(x, w), "sum", group())
        total = first + funcol.all_reduce(F.linear(x, v), "sum", group())
        return total.relu() + total

    text = rewritten(fn, *(torch.zeros(16, 12) for _ in range(3)))
    assert text.count("autofuse.matmul_all_reduce") == 1, text


def test_a_sum_whose_products_are_read_besides_is_one_too() -> None:
    """One rank alone may read them: ranks merge alike. The merged op has no product of each term; torch has."""

    def fn(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = x @ v, x @ w
        total = funcol.all_reduce(a, "sum", group()) + funcol.all_reduce(b, "sum", group())
        return total, a.relu(), b.relu()

    text = rewritten(fn, torch.randn(8, 16), torch.randn(16, 4), torch.randn(16, 4))
    assert text.count("autofuse.matmul_all_reduce.default(") == 1


def test_the_bias_of_one_of_two_added_reductions() -> None:
    """It goes to the first product of the merged op, which must be its own."""

    def fn(x: Tensor, y: Tensor, v: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        first = funcol.all_reduce(F.linear(x, v), "sum", group())
        return first + funcol.all_reduce(F.linear(y, w, bias), "sum", group())

    args = (torch.zeros(16, 12), torch.zeros(16, 8), torch.zeros(4, 12), torch.zeros(4, 8), torch.zeros(4))
    text = rewritten(fn, *args)
    (line,) = [line for line in text.splitlines() if "autofuse.matmul_all_reduce" in line]
    shapes = dict(re.findall(r"^(\w+): (\[.*?\]) =", text, re.MULTILINE))
    weights = re.search(r"\], \[(\w+), \w+\], \[\w+\], 'addmm %0'", line)
    assert weights is not None, text
    assert shapes[weights[1]] == "[8, 4]", text


@pytest.mark.parametrize(
    ("dtype", "added_in", "ops"),
    [
        (torch.bfloat16, torch.bfloat16, 1),
        (torch.bfloat16, torch.float32, 1),
        (torch.float16, torch.float16, 2),
        (torch.float16, torch.float32, 2),
        (torch.float32, torch.bfloat16, 2),
    ],
)
def test_the_dtypes_of_added_reductions(dtype: torch.dtype, added_in: torch.dtype, ops: int) -> None:
    """The sum of what ranks add in float16 may exceed its range; a cast to bfloat16 rounds each term."""

    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        first = funcol.all_reduce(F.linear(x, w), "sum", group()).view(4, 4, 16).to(added_in)
        return first + funcol.all_reduce(F.linear(x, v), "sum", group()).to(added_in).view(4, 4, 16)

    args = [torch.zeros(16, 12, dtype=dtype) for _ in range(3)]
    assert rewritten(fn, *args).count("autofuse.matmul_all_reduce") == ops


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_added_reductions_of_widened_products(dtype: torch.dtype) -> None:
    """As autocast has them: products are rounded one by one, and added in float32."""

    def fn(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Tensor:
        products = (F.linear(x, weight).float() for weight in (w, v, u))
        first, second, third = (funcol.all_reduce(p, "sum", group()) for p in products)
        return first + second + third

    given = [torch.zeros(n, 12, dtype=dtype) for n in (8, 16, 16, 16)]
    text = rewritten(fn, *given)
    (line,) = [line for line in text.splitlines() if "autofuse.matmul_all_reduce" in line]
    assert "'mm; to float32; add %0'" in line
    assert (text.count("aten.mm.default"), text.count("aten.add.Tensor")) == (2, 1)


@pytest.mark.parametrize(("how", "ops"), [("sum", 1), ("index_add", 2)])
def test_the_reductions_of_chosen_experts_and_of_a_shared_one(how: str, ops: int) -> None:
    """Kernels add a matrix to rows that they add up, but not where the sum has a base."""
    model, args = build(how, shared=True)(2, 0)
    with torch.no_grad():
        text = rewritten(model, *args)
    assert text.count("autofuse.matmul_all_reduce.default(") == ops
    assert ("sum 2; to bfloat16; add %3'" in text) == (ops == 1)


@pytest.mark.parametrize("widened", ["before", "behind"])
def test_added_reductions_of_two_dtypes_stay_two(widened: str) -> None:
    """The product of the first is widened before its reduction, or behind it."""

    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        product = F.linear(x.bfloat16(), w.bfloat16())
        product = product.float() if widened == "before" else product
        first = funcol.all_reduce(product, "sum", group()).float()
        return first + funcol.all_reduce(F.linear(x, v), "sum", group())

    args = [torch.zeros(16, 12) for _ in range(3)]
    assert rewritten(fn, *args).count("autofuse.matmul_all_reduce") == 2


def test_gathers_of_one_input() -> None:
    def fn(x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (
            F.linear(funcol.all_gather_tensor(x, 0, group()), q),
            F.linear(funcol.all_gather_tensor(x, 0, group()), k.relu()),
        )

    args = (torch.zeros(3, 12), torch.zeros(16, 12), torch.zeros(8, 12))
    assert_expected_inline(
        rewritten(fn, *args),
        """\
permute: [12, 16] = aten.permute.default(arg0, [1, 0])
relu: [8, 12] = aten.relu.default(arg1)
permute_1: [12, 8] = aten.permute.default(relu, [1, 0])
all_gather_matmul_default:  = autofuse.all_gather_matmul.default(arg2, [permute, permute_1], [], 0, 1, False, '0', 'direct', SITE)
getitem: [12, 16] = getitem(all_gather_matmul_default, 0)
getitem_1: [12, 8] = getitem(all_gather_matmul_default, 1)
return (getitem, getitem_1)""",
    )


def test_gathered_weight() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, funcol.all_gather_tensor(w, 0, group()))

    assert_expected_inline(
        rewritten(fn, torch.zeros(2, 8, 12), torch.zeros(4, 12)),
        """\
view: [16, 12] = aten.reshape.default(arg0, [16, 12])
permute_default: [12, 16] = aten.permute.default(view, [1, 0])
all_gather_matmul_default:  = autofuse.all_gather_matmul.default(arg1, [permute_default], [], 0, 1, False, '0', 'direct', SITE)
getitem: [16, 16] = getitem(all_gather_matmul_default, 0)
permute_default_1: [16, 16] = aten.permute.default(getitem, [1, 0])
view_1: [2, 8, 16] = aten.reshape.default(permute_default_1, [2, 8, 16])
return (view_1,)""",
    )


def test_scatter_of_varying_rows() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return funcol.reduce_scatter_tensor(F.linear(x, w), "sum", 1, group())

    x = torch.zeros(2, 8, 12)
    torch._dynamo.mark_dynamic(x, 1)
    assert_expected_inline(
        rewritten(fn, x, torch.zeros(16, 12)),
        """\
mul_3:  = mul(2, arg0)
view: [2*s27, 12] = aten.reshape.default(arg1, [mul_3, 12])
permute: [12, 16] = aten.permute.default(arg2, [1, 0])
matmul_reduce_scatter_default:  = autofuse.matmul_reduce_scatter.default([view], [permute], [], 'mm', 'sum', 0, 2, False, [], '', '', '0', 'direct', SITE)
getitem_4: [(s27//2), 16] = getitem(matmul_reduce_scatter_default, 0)
reshape_default: [2, (s27//4), 16] = aten.reshape.default(getitem_4, [2, -1, 16])
return (reshape_default,)""",
    )


def test_embedding_bag_all_to_all() -> None:
    def fn(a: Tensor, b: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        pooled = [F.embedding_bag(indices, w, offsets, mode="sum") for w in (a, b)]
        out = funcol.all_to_all_single(torch.stack(pooled, 1), None, None, group())
        return out.view(4, 2, 2, 6).transpose(0, 1).reshape(2, 8, 6).relu()

    assert_expected_inline(
        rewritten(fn, torch.zeros(9, 6), torch.zeros(9, 6), torch.zeros(24).long(), torch.arange(0, 24, 3)),
        """\
embedding_bag_all_to_all_default: [2, 48] = autofuse.embedding_bag_all_to_all.default([arg0, arg1], [arg2, arg2], [arg3, arg3], [], 0, False, -1, torch.float32, [12, 12, 12, 12], 'bsc', '0', 'direct', SITE)
reshape_default: [2, 8, 6] = aten.reshape.default(embedding_bag_all_to_all_default, [2, 8, 6])
relu: [2, 8, 6] = aten.relu.default(reshape_default)
return (relu,)""",
    )


def test_expert_matmul_all_to_all() -> None:
    def fn(h: Tensor, w: Tensor) -> Tensor:
        y = torch.bmm(h, w).view(3, 4, 5, 6).transpose(0, 1).reshape(12, 5, 6)
        return funcol.all_to_all_single(y, None, None, group()).relu()

    assert_expected_inline(
        rewritten(fn, torch.zeros(3, 20, 7), torch.zeros(3, 7, 6)),
        """\
expert_matmul_all_to_all_default:  = autofuse.expert_matmul_all_to_all.default([arg0], [arg1], [], [], 'mm', 0, None, None, [], [], 1, 1, False, '0', 'direct', SITE)
getitem: [4, 3, 5, 6] = getitem(expert_matmul_all_to_all_default, 0)
reshape_default: [12, 5, 6] = aten.reshape.default(getitem, [12, 5, 6])
relu: [12, 5, 6] = aten.relu.default(reshape_default)
return (relu,)""",
    )


def test_policy_never_leaves_the_graph() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return funcol.all_reduce(F.linear(x, w), "sum", group())

    assert_expected_inline(
        rewritten(fn, torch.zeros(8, 12), torch.zeros(16, 12), policy="never"),
        """\
permute: [12, 16] = aten.permute.default(arg0, [1, 0])
mm: [8, 16] = aten.mm.default(arg1, permute)
all_reduce: [8, 16] = _c10d_functional.all_reduce_.default(mm, 'sum', '0')
wait_tensor: [8, 16] = _c10d_functional.wait_tensor.default(all_reduce)
return (wait_tensor,)""",
    )


def test_logits_of_an_lm_head() -> None:
    """The cast behind the gather and the views of the other dim end in one reshape of the fused op's result."""

    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        whole = funcol.all_gather_tensor(F.linear(x, w, b), 0, group())
        return torch.cat(whole.chunk(4), -1).float()

    arguments = torch.randn(2, 3, 8).bfloat16(), torch.randn(5, 8).bfloat16(), torch.randn(5).bfloat16()
    assert_expected_inline(
        rewritten(fn, *arguments),
        """\
view: [6, 8] = aten.reshape.default(arg0, [6, 8])
permute: [8, 5] = aten.permute.default(arg1, [1, 0])
matmul_all_gather_default:  = autofuse.matmul_all_gather.default([view], [permute], [arg2], 'addmm %0', 1, 1, False, False, '0', 'direct', SITE)
getitem_4: [6, 20] = getitem(matmul_all_gather_default, 0)
convert_element_type_default: [6, 20] = prims.convert_element_type.default(getitem_4, torch.float32)
reshape_default: [2, 3, 20] = aten.reshape.default(convert_element_type_default, [2, 3, 20])
return (reshape_default,)""",
    )


def test_gathered_heads() -> None:
    """What moves elements between the product and the gather is done once, behind the op."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x, w).view(2, 3, 2, 5).transpose(1, 2).contiguous()
        return torch.cat(funcol.all_gather_tensor(y, 0, group()).chunk(4), 1)

    assert_expected_inline(
        rewritten(fn, torch.randn(2, 3, 8), torch.randn(10, 8)),
        """\
view: [6, 8] = aten.reshape.default(arg0, [6, 8])
permute: [8, 10] = aten.permute.default(arg1, [1, 0])
matmul_all_gather_default:  = autofuse.matmul_all_gather.default([view], [permute], [], 'mm', 0, 1, False, False, '0', 'direct', SITE)
getitem_4: [24, 10] = getitem(matmul_all_gather_default, 0)
reshape_default: [4, 2, 3, 2, 5] = aten.reshape.default(getitem_4, [4, 2, 3, 2, 5])
permute_default: [2, 4, 2, 3, 5] = aten.permute.default(reshape_default, [1, 0, 3, 2, 4])
reshape_default_1: [2, 8, 3, 5] = aten.reshape.default(permute_default, [2, 8, 3, 5])
return (reshape_default_1,)""",
    )


def test_experts_all_reduce() -> None:
    def fn(x: Tensor, w: Tensor, ends: Tensor, scores: Tensor, order: Tensor) -> Tensor:
        rows = torch._grouped_mm(x, w.mT, offs=ends) * scores.unsqueeze(-1)
        tokens = rows[order].view(-1, 2, 16).sum(1).to(x.dtype)
        return funcol.all_reduce(tokens.view(2, 3, 16), "sum", group()).relu()

    x, w = torch.zeros(12, 8, dtype=torch.bfloat16), torch.zeros(4, 16, 8, dtype=torch.bfloat16)
    ends, order = torch.zeros(4, dtype=torch.int32), torch.arange(12)
    assert_expected_inline(
        rewritten(fn, x, w, ends, torch.zeros(12), order),
        """\
permute: [4, 8, 16] = aten.permute.default(arg0, [0, 2, 1])
unsqueeze: [12, 1] = aten.unsqueeze.default(arg1, -1)
reshape_default: [4, 1] = aten.reshape.default(arg2, [4, 1])
lt_scalar: [12] = aten.lt.Scalar(arg3, 0)
add_tensor: [12] = aten.add.Tensor(arg3, 12)
where_self: [12] = aten.where.self(lt_scalar, add_tensor, arg3)
reshape_default_1: [12, 1] = aten.reshape.default(where_self, [12, 1])
matmul_all_reduce_default:  = autofuse.matmul_all_reduce.default([arg4], [permute], [reshape_default, unsqueeze, reshape_default_1], 'grouped %0; mul %1; take %2; sum 2; to bfloat16', 'sum', False, [], '', '', '0', 'direct', SITE)
getitem: [6, 16] = getitem(matmul_all_reduce_default, 0)
reshape_default_2: [2, 3, 16] = aten.reshape.default(getitem, [2, 3, 16])
relu: [2, 3, 16] = aten.relu.default(reshape_default_2)
return (relu,)""",
    )

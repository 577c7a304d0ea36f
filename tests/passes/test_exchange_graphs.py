"""Graphs of the exchanges after the rewrite, node by node. `EXPECTTEST_ACCEPT=1 pytest` writes them anew."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

from .dense import group
from .test_graphs import rewritten


def exchange(x: Tensor) -> Tensor:
    return funcol.all_to_all_single(x.contiguous(), None, None, group())


def test_dispatch_of_a_gated_network() -> None:
    def fn(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        h = exchange(x).view(4, 3, 5, 7).transpose(0, 1).reshape(3, 20, 7)
        return F.silu(torch.bmm(h, gate)) * torch.bmm(h, up)

    assert_expected_inline(
        rewritten(fn, torch.zeros(12, 5, 7), torch.zeros(3, 7, 6), torch.zeros(3, 7, 6)),
        """\
reshape_default: [4, 3, 5, 7] = aten.reshape.default(arg0, [4, 3, 5, 7])
all_to_all_expert_matmul_default:  = autofuse.all_to_all_expert_matmul.default(reshape_default, [arg1, arg2], [], '', 0, None, None, [], [], 1, 1, False, '0', 'direct', SITE)
getitem: [3, 20, 6] = getitem(all_to_all_expert_matmul_default, 0)
getitem_1: [3, 20, 6] = getitem(all_to_all_expert_matmul_default, 1)
neg: [3, 20, 6] = aten.neg.default(getitem)
exp: [3, 20, 6] = aten.exp.default(neg)
add: [3, 20, 6] = aten.add.Tensor(exp, 1)
div: [3, 20, 6] = aten.div.Tensor(getitem, add)
mul: [3, 20, 6] = aten.mul.Tensor(div, getitem_1)
return (mul,)""",
    )


def test_combine_of_a_loop_whose_first_result_is_read() -> None:
    def fn(x: Tensor, w: Tensor, v: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        y = [F.linear(x, w, b) * 0.5, F.linear(x, v, c) * 0.5]
        parts = torch.stack(y).view(2, 4, 5, 6).transpose(0, 1).reshape(40, 6)
        return exchange(parts), y[0].sum(0)

    args = (torch.zeros(20, 7), torch.zeros(6, 7), torch.zeros(6, 7), torch.zeros(6), torch.zeros(6))
    assert_expected_inline(
        rewritten(fn, *args),
        """\
permute: [7, 6] = aten.permute.default(arg0, [1, 0])
permute_1: [7, 6] = aten.permute.default(arg1, [1, 0])
expert_matmul_all_to_all_default:  = autofuse.expert_matmul_all_to_all.default([arg2, arg2], [permute, permute_1], [arg3, arg4], [], 'mm; mul 0.5', 2, None, None, [], [], 1, 1, True, '0', 'direct', SITE)
getitem: [4, 2, 5, 6] = getitem(expert_matmul_all_to_all_default, 0)
reshape_default: [40, 6] = aten.reshape.default(getitem, [40, 6])
getitem_1: [2, 20, 6] = getitem(expert_matmul_all_to_all_default, 1)
select_int: [20, 6] = aten.select.int(getitem_1, 0, 0)
sum_1: [6] = aten.sum.dim_IntList(select_int, [0])
return (reshape_default, sum_1)""",
    )


def test_combine_of_rows_in_parts_of_any_size() -> None:
    def fn(x: Tensor, w: Tensor, weights: Tensor) -> Tensor:
        y = (x @ w * weights).masked_fill(weights < 0.1, 0.0)
        return funcol.all_to_all_single(y, [1, 2, 3, 4], [2, 4, 6, 8], group()).relu()

    assert_expected_inline(
        rewritten(fn, torch.zeros(20, 7), torch.zeros(7, 6), torch.zeros(20, 1)),
        """\
lt: [20, 1] = aten.lt.Scalar(arg0, 0.1)
reshape_default: [1, 20, 1] = aten.reshape.default(arg0, [1, 20, 1])
reshape_default_1: [20, 1] = aten.reshape.default(reshape_default, [20, 1])
reshape_default_2: [1, 20, 1] = aten.reshape.default(lt, [1, 20, 1])
reshape_default_3: [20, 1] = aten.reshape.default(reshape_default_2, [20, 1])
unsqueeze_default: [1, 7, 6] = aten.unsqueeze.default(arg1, 0)
expert_matmul_all_to_all_default:  = autofuse.expert_matmul_all_to_all.default([arg2], [unsqueeze_default], [], [reshape_default_1, reshape_default_3], 'mm; mul %0; masked_fill %1 0.0', 0, None, None, [1, 2, 3, 4], [2, 4, 6, 8], 1, 1, False, '0', 'direct', SITE)
getitem: [10, 6] = getitem(expert_matmul_all_to_all_default, 0)
relu: [10, 6] = aten.relu.default(getitem)
return (relu,)""",
    )


def test_heads_are_scattered() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        q = F.linear(x, w, b).view(2, 3, 4, 2, 5).permute(2, 1, 0, 3, 4)
        return exchange(q).view(12, 2, 2, 5).transpose(0, 1).relu()

    assert_expected_inline(
        rewritten(fn, torch.zeros(2, 3, 7), torch.zeros(40, 7), torch.zeros(40)),
        """\
view: [6, 7] = aten.reshape.default(arg0, [6, 7])
permute: [7, 40] = aten.permute.default(arg1, [1, 0])
unsqueeze_default: [1, 6, 7] = aten.unsqueeze.default(view, 0)
unsqueeze_default_1: [1, 7, 40] = aten.unsqueeze.default(permute, 0)
reshape_default: [1, 40] = aten.reshape.default(arg2, [1, 40])
expert_matmul_all_to_all_default:  = autofuse.expert_matmul_all_to_all.default([unsqueeze_default], [unsqueeze_default_1], [reshape_default], [], 'mm', 0, None, None, [], [], 2, 1, False, '0', 'direct', SITE)
getitem: [4, 1, 6, 10] = getitem(expert_matmul_all_to_all_default, 0)
reshape_default_1: [4, 2, 3, 2, 5] = aten.reshape.default(getitem, [4, 2, 3, 2, 5])
permute_default: [4, 3, 2, 2, 5] = aten.permute.default(reshape_default_1, [0, 2, 1, 3, 4])
view_3: [12, 2, 2, 5] = aten.reshape.default(permute_default, [12, 2, 2, 5])
permute_2: [2, 12, 2, 5] = aten.permute.default(view_3, [1, 0, 2, 3])
relu: [2, 12, 2, 5] = aten.relu.default(permute_2)
return (relu,)""",
    )


def test_heads_are_gathered() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        heads = exchange(x).view(4, 2, 3, 2, 5).permute(3, 2, 0, 1, 4)
        return heads.reshape(2, 3, 40) @ w

    assert_expected_inline(
        rewritten(fn, torch.zeros(8, 3, 2, 5), torch.zeros(40, 7)),
        """\
reshape_default: [4, 2, 3, 2, 5] = aten.reshape.default(arg0, [4, 2, 3, 2, 5])
permute_default: [4, 2, 3, 2, 5] = aten.permute.default(reshape_default, [0, 3, 2, 1, 4])
reshape_default_1: [4, 1, 6, 10] = aten.reshape.default(permute_default, [4, 1, 6, 10])
unsqueeze_default: [1, 40, 7] = aten.unsqueeze.default(arg1, 0)
all_to_all_expert_matmul_default:  = autofuse.all_to_all_expert_matmul.default(reshape_default_1, [unsqueeze_default], [], '', 0, None, None, [], [], 2, 1, False, '0', 'direct', SITE)
getitem: [1, 6, 7] = getitem(all_to_all_expert_matmul_default, 0)
reshape_default_2: [6, 7] = aten.reshape.default(getitem, [6, 7])
view_3: [2, 3, 7] = aten.reshape.default(reshape_default_2, [2, 3, 7])
return (view_3,)""",
    )


def test_tables_of_several_widths_with_bfloat16_on_the_wire() -> None:
    def fn(a: Tensor, b: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        pooled = [F.embedding_bag(indices, w, offsets, mode="mean") for w in (a, b)]
        out = exchange(torch.cat(pooled, 1).bfloat16()).float()
        return out.view(4, 2, 10).transpose(0, 1).reshape(2, 40).relu()

    args = (torch.zeros(9, 6), torch.zeros(9, 4), torch.zeros(24).long(), torch.arange(0, 24, 3))
    assert_expected_inline(
        rewritten(fn, *args),
        """\
embedding_bag_all_to_all_default: [2, 40] = autofuse.embedding_bag_all_to_all.default([arg0, arg1], [arg2, arg2], [arg3, arg3], [], 1, False, -1, torch.bfloat16, [10, 10, 10, 10], 'bsc', '0', 'direct', SITE)
reshape_default: [2, 4, 10] = aten.reshape.default(embedding_bag_all_to_all_default, [2, 4, 10])
permute_default: [4, 2, 10] = aten.permute.default(reshape_default, [1, 0, 2])
reshape_default_1: [8, 10] = aten.reshape.default(permute_default, [8, 10])
convert_element_type_1: [8, 10] = prims.convert_element_type.default(reshape_default_1, torch.float32)
view: [4, 2, 10] = aten.reshape.default(convert_element_type_1, [4, 2, 10])
permute: [2, 4, 10] = aten.permute.default(view, [1, 0, 2])
clone: [2, 4, 10] = aten.clone.default(permute)
view_1: [2, 40] = aten.reshape.default(clone, [2, 40])
relu: [2, 40] = aten.relu.default(view_1)
return (relu,)""",
    )

"""`autofuse.ops` around an all-to-all: values, gradients and the errors for what does not fit."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import opcheck
from torch.nn import functional as F

from autofuse import ops
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


def _gathered(t: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return parts


def _embedding(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    weights = [torch.randn(11, 8, requires_grad=True) for _ in range(2)]
    indices = [torch.randint(0, 11, (3 * world, 4)) for _ in weights]
    y = ops.embedding_bag_all_to_all(weights, indices, layout="bstd")
    pooled = torch.stack(
        [F.embedding_bag(i, w, mode="sum") for i, w in zip(indices, weights, strict=True)], 1
    )
    mine = [p[3 * rank : 3 * (rank + 1)] for p in _gathered(pooled.detach())]
    torch.testing.assert_close(y, torch.stack(mine, 1), rtol=1e-6, atol=1e-6)
    grad = torch.randn_like(y)
    y.backward(grad)
    (tables, exchanged) = ops.all_to_all_embedding_bag_backward(
        grad, indices, num_embeddings=[11, 11], dims=[8, 8], layout="bstd", return_exchanged=True
    )
    assert all(torch.equal(w.grad, t) for w, t in zip(weights, tables, strict=True))
    wanted = torch.autograd.grad(pooled, weights, exchanged.view(pooled.shape))
    for got, want in zip(tables, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_embedding(ranks: Ranks) -> None:
    ranks(2).run(_embedding)


def _experts(rank: int, world: int) -> None:
    """Fixed capacity there and back is a matmul where the rows are."""
    torch.manual_seed(rank)
    x = torch.randn(world, 2, 5, 8, requires_grad=True)
    w, v = (torch.randn(2, 8, 8, requires_grad=True) for _ in range(2))
    bias = torch.randn(2, 8, requires_grad=True)
    y = ops.expert_matmul_all_to_all(ops.all_to_all_expert_matmul(x, w), v, bias)
    every = zip(_gathered(w.detach()), _gathered(v.detach()), _gathered(bias.detach()), strict=True)
    inputs = x.detach().clone().requires_grad_()
    want = torch.stack([inputs[r] @ a @ b + c.unsqueeze(1) for r, (a, b, c) in enumerate(every)])
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
    y.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(x.grad, inputs.grad, rtol=1e-4, atol=1e-4)
    assert w.grad is not None
    assert v.grad is not None
    torch.testing.assert_close(bias.grad, torch.full_like(bias, 5.0 * world))


def test_experts_there_and_back(ranks: Ranks) -> None:
    ranks(2).run(_experts)


def _dropless(rank: int, world: int) -> None:
    x, w = torch.randn(6 * world, 4), [torch.randn(1, 4, 3), torch.randn(1, 4, 5)]
    splits, offsets = [6] * world, torch.tensor([6 * world], dtype=torch.int32)
    outputs, exchanged = ops.all_to_all_expert_matmul(
        x, w, offsets=offsets, output_splits=splits, input_splits=splits, return_exchanged=True
    )
    mine = torch.cat([p[6 * rank : 6 * (rank + 1)] for p in _gathered(x)])
    assert torch.equal(exchanged, mine)
    for y, wi in zip(outputs, w, strict=True):
        torch.testing.assert_close(y, mine @ wi[0], rtol=1e-5, atol=1e-5)


def test_dropless_with_two_consumers(ranks: Ranks) -> None:
    ranks(2).run(_dropless)


def _wrong(rank: int, world: int) -> None:
    table, indices = torch.randn(5, 4), torch.zeros(4, 2, dtype=torch.int64)
    bag = ops.embedding_bag_all_to_all
    bad = [
        (lambda: bag(table, indices[:3]), "3 bags cannot be cut into 2"),
        (lambda: bag(table, indices, layout="btsd"), "unknown layout"),
        (lambda: bag(table, indices, mode="prod"), "unknown mode"),
        (
            lambda: bag(table, indices, columns=[4, 3], layout="bstd"),
            "columns" if rank else "tables of one dim",
        ),
        (lambda: bag(table, indices, columns=[4]), "1 entries for 2 ranks"),
        (lambda: bag([table, table], indices), "2 tables and 1 lists"),
        (lambda: bag(table, indices.float()), "int32 or int64"),
        (lambda: bag(table, indices[0]), "without offsets"),
        (lambda: bag(table, indices, None, torch.rand(4, 2), mode="mean"), "mode 'sum'"),
        (lambda: bag(table, indices, None, torch.rand(4, 2).double()), "float64"),
        (lambda: bag(table, indices, padding_idx=-1), "negative"),
        (lambda: ops.expert_matmul_all_to_all(torch.randn(2, 3, 4), torch.randn(2, 4, 4)), "no multiple"),
        (lambda: ops.expert_matmul_all_to_all(torch.randn(2, 4, 4), torch.randn(2, 5, 4)), "expected w"),
        (
            lambda: ops.expert_matmul_all_to_all(torch.randn(2, 4, 4), torch.randn(2, 4, 4).half()),
            "one dtype",
        ),
        (lambda: ops.all_to_all_expert_matmul(torch.randn(2, 4, 4), torch.randn(1, 4, 4)), "expected x"),
        (
            lambda: ops.all_to_all_expert_matmul(
                torch.randn(4, 4), torch.randn(1, 4, 4), offsets=torch.tensor([4], dtype=torch.int32)
            ),
            "pass output_splits",
        ),
    ]
    for call, text in bad:
        with pytest.raises(ValueError, match=text):
            call()


def test_errors_for_users(ranks: Ranks) -> None:
    ranks(2).run(_wrong)


def _opcheck(rank: int, world: int) -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    name = dist.group.WORLD.group_name
    tables, indices = [torch.randn(7, 4)], [torch.zeros(5, dtype=torch.int64)]
    offsets = [torch.tensor([0, 1, 3, 3])]
    common = ("direct", "opcheck")
    bags = (indices, offsets, [])
    options, rest = (0, False, -1, torch.float32), ([4, 4], "bsc")
    opcheck(
        torch.ops.autofuse.embedding_bag_all_to_all.default,
        (tables, *bags, *options, *rest, name, *common),
        test_utils=checks,
    )
    opcheck(
        torch.ops.autofuse.all_to_all_embedding_bag_backward.default,
        (torch.randn(2, 8), *bags, [7], [4], *options, [False], *rest, True, name, *common),
        test_utils=checks,
    )
    learning = ([torch.zeros(7)], [torch.tensor([0.5, 1e-3])])
    opcheck(
        torch.ops.autofuse.all_to_all_embedding_bag_update.default,
        (tables, *learning, torch.randn(2, 8), *bags, *options[:3], *rest, True, name, *common),
        test_utils=checks,
    )
    w, ends = torch.randn(2, 4, 6), torch.tensor([2, 6], dtype=torch.int32)
    opcheck(
        torch.ops.autofuse.expert_matmul_all_to_all.default,
        ([torch.randn(6, 4)], [w], [], [], "mm; mul 2", 0, ends, torch.randperm(6), [3, 3], [3, 3], 1, 1,
         True, name, *common),
        test_utils=checks,
    )  # fmt: skip
    opcheck(
        torch.ops.autofuse.all_to_all_expert_matmul.default,
        (torch.randn(2, 2, 3, 4), [w, w], [], "", 0, None, None, [], [], 1, 1, True, name, *common),
        test_utils=checks,
    )


def test_opcheck(ranks: Ranks) -> None:
    ranks(2).run(_opcheck)

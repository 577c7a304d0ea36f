"""What the executors' plans are made from, as reports ask for it: from arguments without data."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from autofuse.lowering.ops.library import FUSED_OPS
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.plan import FAMILIES
from autofuse.lowering.verify import verify
from tests.passes.harness import fake_group

WORLD = 4
NO_TAIL = [], "", ""


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    with fake_group(WORLD):
        yield


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def shape_of(op: str, *args: object, order: str = "direct") -> PlanShape:
    fused_op = FUSED_OPS[op]
    assert fused_op.plan_shape is not None
    shape = fused_op.plan_shape(fused_op.parse((*args, "0", order, "site")))
    assert (shape.op, shape.order, shape.world) == (op, order, WORLD)
    verify(shape.plans())
    return shape


def test_every_op_has_one() -> None:
    assert FUSED_OPS.keys() == FAMILIES.keys()
    assert {op for op in FUSED_OPS if FUSED_OPS[op].plan_shape is None} == {
        "expert_matmul_all_to_all",
        "all_to_all_expert_matmul",
    }


@pytest.mark.parametrize("order", ["direct", "ring", "oblivious"])
def test_reductions(order: str) -> None:
    arguments = [meta(8, 16)], [meta(16, 12)], [], "mm", "sum"
    assert shape_of("matmul_all_reduce", *arguments, False, *NO_TAIL, order=order).one_shot == (
        order == "direct"
    )
    large = [meta(4096, 16)], [meta(16, 1024)], [], "mm; to bfloat16", "sum"
    assert not shape_of("matmul_all_reduce", *large, False, *NO_TAIL, order=order).one_shot
    shape = shape_of("matmul_reduce_scatter", *large, 0, 2, False, *NO_TAIL, order=order)
    assert shape.chunks == (((1024, 1024),) * WORLD,)
    assert len(shape.plan(0).tiles(0)) == 2  # of a MiB


def test_gathered() -> None:
    shape = shape_of("all_gather_matmul", meta(2048, 64), [meta(64, 8)], [], 0, 1, False)
    assert shape.chunks == (((2048, 64),) * WORLD,)


@pytest.mark.parametrize("order", ["direct", "ring", "oblivious"])
def test_published(order: str) -> None:
    x, w = meta(4, 64, dtype=torch.bfloat16), meta(64, 32064, dtype=torch.bfloat16)
    shape = shape_of("matmul_all_gather", [x], [w], [], "mm", 1, 1, False, False, order=order)
    assert shape.chunks == (((4, 32064),) * WORLD,)
    assert shape.block == (4, 32064)
    rows = [meta(4096, 64)], [meta(64, 256)], [meta(256)], "addmm %0", 0, 8, True, False
    assert shape_of("matmul_all_gather", *rows, order=order).block == (1024, 256)


def test_embeddings() -> None:
    weights, indices = [meta(9, 8)], [meta(40, dtype=torch.int64)]
    offsets = [meta(41, dtype=torch.int64)]
    columns, rest = [8, 8, 16, 0], (0, True, -1, torch.float32)
    forward = shape_of("embedding_bag_all_to_all", weights, indices, offsets, [], *rest, columns, "bsc")
    assert [chunks[0] for chunks in forward.chunks] == [(10, 8), (10, 8), (10, 16), (10, 0)]
    backward = shape_of(
        "all_to_all_embedding_bag_backward",
        meta(10, 32), indices, offsets, [], [9], [8], *rest, [False], columns, "bsc", False,
    )  # fmt: skip
    assert backward.chunks == (((10, 8), (10, 8), (10, 16), (10, 0)),)
    update = shape_of(
        "all_to_all_embedding_bag_update",
        weights, [], [meta(2)], meta(10, 32), indices, offsets, [], 0, True, -1, columns, "bsc", False,
    )  # fmt: skip
    assert update.chunks == backward.chunks


def test_any_size() -> None:
    shape = PlanShape.of_any_size("expert_matmul_all_to_all", "direct", WORLD)
    assert not shape.sized
    verify(shape.plans())

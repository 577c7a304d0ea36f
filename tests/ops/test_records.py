"""What an op says of itself: its schema, and what its GPU kernels do not take."""

from typing import Annotated, Any, NamedTuple

import pytest
import torch
from torch import Tensor

from autofuse.lowering.ops.library import FUSED_OPS, FusedOp, SymInt, SymInts
from autofuse.lowering.plan import Family

X, W = torch.empty(8, 4, dtype=torch.bfloat16), torch.empty(4, 6, dtype=torch.bfloat16)
EXPERTS = torch.empty(2, 4, 6, dtype=torch.bfloat16)
ROWS = torch.empty(2, 8, 4, dtype=torch.bfloat16)
PARTS = torch.empty(2, 2, 4, 4, dtype=torch.bfloat16)
SITE = ("0", "direct", "test")


class Everything(NamedTuple):
    x: Tensor
    many: list[Tensor]
    perhaps: Tensor | None
    changed: Annotated[list[Tensor], "Tensor(a!)[]"]
    size: SymInt
    sizes: SymInts
    count: int
    flag: bool
    flags: list[bool]
    dtype: torch.dtype
    text: str
    group_name: str
    order: str
    site: str


def _op(arguments: type[Any]) -> FusedOp[Any]:
    nothing = Any
    return FusedOp(
        name="everything",
        arguments=arguments,
        returns="Tensor[]",
        family=Family.REDUCE,
        replaces="all_reduce",
        fake=nothing,
        reference=nothing,
        cpu=nothing,
    )


def test_the_schema_follows_from_the_record() -> None:
    assert _op(Everything).schema == (
        "everything(Tensor x, Tensor[] many, Tensor? perhaps, Tensor(a!)[] changed, SymInt size, "
        "SymInt[] sizes, int count, bool flag, bool[] flags, ScalarType dtype, str text, Any group_name, "
        "str order, str site) -> Tensor[]"
    )


def test_a_record_ends_with_group_order_and_site() -> None:
    class Wrong(NamedTuple):
        x: Tensor
        site: str

    with pytest.raises(AssertionError, match="must end with"):
        _ = _op(Wrong).schema


def test_an_op_without_a_kernel_takes_nothing() -> None:
    assert _op(Everything).gpu_gap(None) == "this op has no kernel for GPUs yet"


REDUCE = ([X], [W], [], "mm", "sum")
NO_TAIL = ([], "", "")
GATHER = (X, [W], [], 0, 1, False)
COMBINE = ([ROWS], [EXPERTS], [], [], "mm", 0, None, None, [], [], 1, 1, False)
DISPATCH = (PARTS, [EXPERTS], [], "", 0, None, None, [], [], 1, 1, False)
ENDS = torch.tensor([3, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    ("op", "arguments", "gap"),
    [
        ("matmul_all_reduce", (*REDUCE, False, *NO_TAIL), ""),
        ("matmul_all_reduce", (*REDUCE, False, [], "relu; to float8_e5m2", ""), ""),
        ("matmul_all_reduce", (*REDUCE, False, [], "to float64", ""), "not 'to float64'"),
        ("matmul_all_reduce", (*REDUCE, True, *NO_TAIL), ""),
        ("matmul_all_reduce", ([X], [W], [], "mm; neg", "sum", False, *NO_TAIL), ""),
        ("matmul_reduce_scatter", ([X] * 5, [W] * 5, [], "mm", "sum", 0, 1, False, *NO_TAIL), ""),
        ("matmul_reduce_scatter", (*REDUCE, 1, 1, False, *NO_TAIL), ""),
        ("matmul_reduce_scatter", (*REDUCE, 1, 1, True, *NO_TAIL), "else whole rows"),
        ("matmul_reduce_scatter", ([X], [W], [], "mm; neg", "sum", 1, 1, False, *NO_TAIL), "else whole rows"),
        ("all_gather_matmul", GATHER, ""),
        ("all_gather_matmul", (X, [W] * 2, [X.new_empty(0), X.new_empty(6)], 0, 1, True), ""),
        ("all_gather_matmul", (X, [W], [], 1, 1, False), "not what it contracts"),
        ("all_gather_matmul", (X, [W], [X.new_empty(1)], 0, 1, False), "an entry a column"),
        ("all_gather_matmul", (X, [W], [X.new_empty(8, 1)], 0, 1, False), "an entry a column"),
        ("matmul_all_gather", ([X], [W], [], "mm", 1, 1, False, False), ""),
        ("matmul_all_gather", ([X], [W], [X.new_empty(6)], "addmm %0", 0, 2, False, True), ""),
        ("matmul_all_gather", ([X], [W], [X.new_empty(1)], "addmm %0", 0, 1, False, False), "a column"),
        ("matmul_all_gather", ([X], [W], [], "mm; relu", 1, 1, False, False), "not 'mm; relu' of 1"),
        ("matmul_all_gather", ([X], [W], [], "mm", 1, 2, False, False), "not stretches of columns"),
        ("matmul_all_gather", ([X], [W], [], "mm", 1, 1, True, False), "read elsewhere"),
        ("expert_matmul_all_to_all", COMBINE, ""),
        ("expert_matmul_all_to_all", ([ROWS] * 4, [EXPERTS] * 4, *COMBINE[2:]), ""),
        ("expert_matmul_all_to_all", ([ROWS] * 5, [EXPERTS] * 5, *COMBINE[2:]), "up to 4 matmuls"),
        ("expert_matmul_all_to_all", (*COMBINE[:5], 2, *COMBINE[6:]), "multiplied together"),
        ("expert_matmul_all_to_all", (*COMBINE[:10], 0, 1, False), "equal parts of rows"),
        ("expert_matmul_all_to_all", (*COMBINE[:6], ENDS, None, [4, 4], [4, 4], 1, 1, False), ""),
        (
            "expert_matmul_all_to_all",
            (*COMBINE[:6], None, None, [4, 4], [4, 4], 1, 1, False),
            "equal parts of rows",
        ),
        (
            "expert_matmul_all_to_all",
            ([ROWS] * 2, [EXPERTS] * 2, [X.new_empty(0), X.new_empty(2, 6)], *COMBINE[3:]),
            "the first",
        ),
        ("all_to_all_expert_matmul", DISPATCH, ""),
        ("all_to_all_expert_matmul", (*DISPATCH[:4], 2, *DISPATCH[5:]), "multiplied together"),
        ("all_to_all_expert_matmul", (*DISPATCH[:9], 2, 1, False), "equal parts of rows"),
        (
            "all_to_all_expert_matmul",
            (*DISPATCH[:5], None, None, [4], [4], 1, 1, False),
            "equal parts of rows",
        ),
        ("all_reduce_update", ([X], [], [X], W, [0], None, "sgd", "sum", [False]), ""),
        ("all_reduce_update", ([X.half()], [], [X], W, [0], None, "sgd", "sum", [False]), ""),
        ("all_reduce_update", ([X], [], [X], W, [0], W, "sgd", "sum", [False]), "do not clip"),
        ("all_reduce_update", ([X], [X, X], [X], W, [0], None, "lamb", "sum", [False]), "by LAMB"),
        (
            "all_reduce_update",
            ([X, X.half()], [], [X] * 2, W, [0, 0], None, "sgd", "sum", [False] * 2),
            "of one dtype",
        ),
    ],
)
def test_gaps(op: str, arguments: tuple[Any, ...], gap: str) -> None:
    fused_op = FUSED_OPS[op]
    found = fused_op.gpu_gap(fused_op.parse((*arguments, *SITE)))
    assert (gap in found) if gap else not found


def test_dtypes() -> None:
    op = FUSED_OPS["all_gather_matmul"]
    wide = op.parse((X.float(), [W.float()], *GATHER[2:], *SITE))
    assert op.gpu_dtype_gap(wide) == "float32 is exchanged; GPU kernels take bfloat16 and float16"
    assert not op.gpu_dtype_gap(op.parse((*GATHER, *SITE)))


@pytest.mark.parametrize(
    ("product", "dtype", "gap"),
    [
        ("mm", torch.bfloat16, ""),
        ("mm", torch.float32, ""),
        ("mm; to float64", torch.bfloat16, "float64 is exchanged"),
        ("mm; add %0", torch.bfloat16, "float64 is exchanged"),
        ("mm; add %0; to float16", torch.bfloat16, ""),
        ("mm; mul 0.5", torch.float64, "float64 is exchanged"),
    ],
)
def test_the_dtype_of_a_product_is_exchanged(product: str, dtype: torch.dtype, gap: str) -> None:
    op, operands = FUSED_OPS["matmul_all_reduce"], [X.double()[:, :1]] * ("%0" in product)
    given = op.parse(([X.to(dtype)], [W.to(dtype)], operands, product, "sum", False, *NO_TAIL, *SITE))
    assert op.gpu_dtype_gap(given).split(";")[0] == gap

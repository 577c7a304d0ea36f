"""Ways of the exchanges by name, as the benchmark asks for them, with a workspace that has no GPU."""

from dataclasses import replace
from typing import Any, cast
from unittest.mock import Mock

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from autofuse.lowering.cpu.rendezvous import NotShared
from autofuse.lowering.gpu.choice import calls
from autofuse.lowering.gpu.choice import choose as choice
from autofuse.lowering.gpu.choice.choose import Point
from autofuse.lowering.gpu.dense.ways import CUBLAS_NCCL
from autofuse.lowering.gpu.embedding import (
    backward as embedding_backward,
)
from autofuse.lowering.gpu.embedding import (
    by_name as embedding_by_name,
)
from autofuse.lowering.gpu.embedding import (
    call as embedding,
)
from autofuse.lowering.gpu.embedding.ways import BACKWARD, MERGED_NCCL, OP, TORCH_NCCL
from autofuse.lowering.gpu.experts import by_name as experts_by_name
from autofuse.lowering.gpu.experts import call as expert_ops
from autofuse.lowering.gpu.experts.ways import COMBINE, DISPATCH
from autofuse.lowering.ops.library import FUSED_OPS

BF16 = torch.bfloat16
WORLD = 4


def _bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=BF16)


SITE = ("group", "direct", "test")
W = _bf16(2, 64, 128)
ENDS, SPLITS = torch.tensor([3, 8], dtype=torch.int32), [2] * WORLD
INDICES, OFFSETS = torch.arange(16), torch.arange(0, 16, 2)
TABLES = ([_bf16(10, 8)] * 2, [INDICES] * 2, [OFFSETS] * 2)
BAGS, COLUMNS = (0, False, -1, BF16), ([16] * WORLD, "bsc")

CALLS: dict[str, tuple[Any, str, tuple[Any, ...]]] = {
    "combine": (experts_by_name, COMBINE, (
        [_bf16(2, WORLD * 8, 64)], [W], [], [], "mm", 0, None, None, [], [], 1, 1, False, *SITE)),
    "dispatch": (experts_by_name, DISPATCH, (
        _bf16(WORLD, 2, 8, 64), [W], [], 0, None, None, [], [], 1, 1, False, *SITE)),
    "dropless combine": (experts_by_name, COMBINE, (
        [_bf16(8, 64)], [W], [], [], "mm", 0, ENDS, torch.arange(8), SPLITS, SPLITS, 1, 1, False, *SITE)),
    "dropless dispatch": (experts_by_name, DISPATCH, (
        _bf16(8, 64), [W], [], 0, ENDS, torch.arange(8), SPLITS, SPLITS, 1, 1, False, *SITE)),
    "bags": (embedding_by_name, OP, (*TABLES, [], *BAGS, *COLUMNS, *SITE)),
    "bags, backward": (embedding_by_name, BACKWARD, (
        _bf16(2, 64), *TABLES[1:], [], [10] * 2, [8] * 2, *BAGS, [False] * 2, *COLUMNS, False, *SITE)),
}  # fmt: skip

DECLINED = {
    "combine": (0, [torch.zeros(2, WORLD * 8, 64)]),
    "dispatch": (3, 2),  # listed experts
    "dropless combine": (12, True),  # the product is kept
    "dropless dispatch": (4, None),  # no offsets
    "bags": (7, torch.float64),
    "bags, backward": (9, torch.float64),
}
"""By call: the argument with which no kernel takes it, as number and value."""


@pytest.fixture(autouse=True)
def workspace(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """On rank 0 of a group of four; points that are kept are those that decide."""
    found = Mock(world=WORLD, rank=0, programs=132, group_name="group", device=torch.device("cpu"))
    points: list[Point] = []
    for module in (expert_ops, embedding, embedding_backward):
        monkeypatch.setattr(module, "workspace_of", lambda *at: found)
    for module in (embedding, embedding_backward):
        monkeypatch.setattr(module, "resolve_group", lambda name: Mock(rank=lambda: 0))
        monkeypatch.setattr(module.layouts, "check", lambda *shapes: None)
    monkeypatch.setattr(calls, "keep", lambda workspace, point: points.insert(0, point))
    monkeypatch.setattr(calls, "chosen", lambda problem, workspace: choice.choose(problem, tuple(points)))
    return found


@pytest.mark.parametrize("call", CALLS)
def test_names_and_what_auto_takes_of_them(call: str) -> None:
    module, op, arguments = CALLS[call]
    plain = TORCH_NCCL if module is embedding_by_name else CUBLAS_NCCL
    fused = module.names(op, arguments, False)
    assert len(fused) > 2
    assert plain not in fused
    assert module.names(op, arguments, True) == [plain, *fused]
    assert (MERGED_NCCL in fused) == (module is embedding_by_name)
    assert module.chosen(op, arguments) == plain
    module.keep(op, arguments, {plain: 9.0, fused[-1]: 3.0, fused[0]: 4.0})
    assert module.chosen(op, arguments) == fused[-1]
    module.keep(op, arguments, {plain: 2.0, fused[-1]: 3.0})
    assert module.chosen(op, arguments) == plain


@pytest.mark.parametrize("call", CALLS)
def test_what_no_kernel_takes_has_no_names(call: str) -> None:
    module, op, arguments = CALLS[call]
    place, value = DECLINED[call]
    odd = (*arguments[:place], value, *arguments[place + 1 :])
    assert module.names(op, odd, True) == module.names(op, odd, False) == []


def test_where_nothing_is_shared_there_are_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_ops, "workspace_of", Mock(side_effect=NotShared("no")))
    assert experts_by_name.names(*CALLS["combine"][1:], True) == []


def test_an_unaligned_weight_has_no_names() -> None:
    op, arguments = CALLS["combine"][1:]
    narrow = (_bf16(2, WORLD * 8, 63)[..., :60], _bf16(2, 60, 128))
    assert experts_by_name.names(op, ([narrow[0]], [narrow[1]], *arguments[2:]), True) == []


RUNS = {
    "combine": (expert_ops, "combine"),
    "dispatch": (expert_ops, "dispatch"),
    "dropless combine": (expert_ops, "dropless_combine"),
    "dropless dispatch": (expert_ops, "dropless_dispatch"),
    "bags": (embedding, "exchange"),
    "bags, backward": (embedding_backward, "exchange_backward"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_way_is_run_by_its_name(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, op, arguments = CALLS[call]
    kernel = Mock(return_value=[_bf16(1)] if call in ("dispatch", "dropless dispatch") else _bf16(1))
    monkeypatch.setattr(*RUNS[call], kernel)
    name = module.names(op, arguments, False)[-1]
    found = module.run(name, op, arguments)
    assert kernel.call_args.args[1] == name
    first = found[0] if isinstance(found, list) else found
    assert torch.equal(cast(Tensor, first), _bf16(1))
    kernel.return_value = None
    with pytest.raises(RuntimeError, match="captured"):
        module.run(name, op, arguments)


@pytest.mark.parametrize("call", ["combine", "dispatch", "bags", "bags, backward"])
def test_what_the_op_replaces_is_run_by_its_name(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, op, arguments = CALLS[call]
    reference = Mock(return_value="torch's")
    monkeypatch.setitem(FUSED_OPS, op, replace(FUSED_OPS[op], reference=reference))
    assert module.run(module.names(op, arguments, True)[0], op, arguments) == "torch's"
    assert reference.call_args.args == (FUSED_OPS[op].parse(arguments),)


@pytest.mark.parametrize("call", ["dropless combine", "dropless dispatch"])
def test_dropless_ops_replace_what_reads_no_offsets_on_the_host(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, op, arguments = CALLS[call]
    grouped = Mock(return_value=_bf16(1))
    monkeypatch.setattr(expert_ops, "combine_unfused" if op == COMBINE else "dispatch_unfused", grouped)
    module.run(CUBLAS_NCCL, op, arguments)
    grouped.assert_called_once()

"""Ways of the exchanges by name, as the benchmark asks for them, with a workspace that has no GPU."""

from dataclasses import replace
from itertools import product
from typing import Any, cast
from unittest.mock import Mock

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from autofuse.lowering.cpu.rendezvous import NotShared
from autofuse.lowering.gpu import by_name
from autofuse.lowering.gpu.choice import calls
from autofuse.lowering.gpu.choice import choose as choice
from autofuse.lowering.gpu.choice.kernel import CUBLAS_NCCL, Problem, Way, ways_of
from autofuse.lowering.gpu.choice.points import Point
from autofuse.lowering.gpu.dense import call as dense
from autofuse.lowering.gpu.dense import token_rows
from autofuse.lowering.gpu.dense.ways import GATHER, REDUCE, SCATTER
from autofuse.lowering.gpu.embedding import call as embedding
from autofuse.lowering.gpu.embedding import reduced, vocabulary
from autofuse.lowering.gpu.embedding.kernels import MERGED_NCCL
from autofuse.lowering.gpu.embedding.ways import BACKWARD, OP, TORCH_NCCL
from autofuse.lowering.gpu.experts import call as expert_ops
from autofuse.lowering.gpu.experts import reduced as tokens
from autofuse.lowering.gpu.experts.ways import COMBINE, DISPATCH
from autofuse.lowering.gpu.optimizer.ways import UpdateProblem
from autofuse.lowering.ops.library import FUSED_OPS
from tests.gpu import test_optimizer

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

CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "combine": (COMBINE, (
        [_bf16(2, WORLD * 8, 64)], [W], [], [], "mm", 0, None, None, [], [], 1, 1, False, *SITE)),
    "dispatch": (DISPATCH, (
        _bf16(WORLD, 2, 8, 64), [W], [], "", 0, None, None, [], [], 1, 1, False, *SITE)),
    "dropless combine": (COMBINE, (
        [_bf16(8, 64)], [W], [], [], "mm", 0, ENDS, torch.arange(8), SPLITS, SPLITS, 1, 1, False, *SITE)),
    "dropless dispatch": (DISPATCH, (
        _bf16(8, 64), [W], [], "", 0, ENDS, torch.arange(8), SPLITS, SPLITS, 1, 1, False, *SITE)),
    "bags": (OP, (*TABLES, [], *BAGS, *COLUMNS, *SITE)),
    "bags, reduced": (REDUCE, (
        [INDICES] * 2, [_bf16(10, 8)] * 2, [OFFSETS] * 2, "bags sum 0 -1", "sum", False, [], "", "", *SITE)),
    "tokens": (REDUCE, (
        [_bf16(8, 64)], [W], [ENDS[:, None]], "grouped %0; sum 2", "sum", True, [], "", "", *SITE)),
    "vocabulary": (REDUCE, (
        [torch.zeros(8, 1, dtype=torch.int64)], [_bf16(10, 64)], [torch.zeros(8, 1, dtype=torch.bool)],
        "rows; masked_fill %0 0.0", "sum", False, [], "", "", *SITE)),
    "bags, backward": (BACKWARD, (
        _bf16(2, 64), *TABLES[1:], [], [10] * 2, [8] * 2, *BAGS, [False] * 2, *COLUMNS, False, *SITE)),
}  # fmt: skip

DENSE: dict[str, tuple[str, tuple[Any, ...]]] = {
    "reduce": (REDUCE, ([_bf16(1, 64)], [_bf16(64, 24)], [], "mm", "sum", False, [], "", "", *SITE)),
    "scatter": (
        SCATTER,
        ([_bf16(8, 64)], [_bf16(64, 8192)], [], "mm", "avg", 0, 1, False, [], "", "", *SITE),
    ),
    "gather": (GATHER, (_bf16(8, 64), [_bf16(64, 8192)] * 2, [], 0, 1, True, *SITE)),
}

DECLINED = {
    "combine": (0, [torch.zeros(2, WORLD * 8, 64)]),
    "dispatch": (4, 2),  # listed experts
    "dropless combine": (12, True),  # the product is kept
    "dropless dispatch": (5, None),  # no offsets
    "bags": (7, torch.float64),
    "bags, reduced": (3, "bags sum 0 -1; mul 2"),
    "tokens": (3, "grouped %0; sum 2; mul 2"),
    "vocabulary": (1, [_bf16(10, 64).double()]),
    "bags, backward": (9, torch.float64),
}
"""By call: the argument with which no kernel takes it, as number and value."""


@pytest.fixture(autouse=True)
def workspace(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """On rank 0 of a group of four; points that are kept are those that decide."""
    found = Mock(world=WORLD, rank=0, programs=132, group_name="group", device=torch.device("cpu"))
    points: list[Point] = []
    for module in (dense, expert_ops, embedding, reduced, tokens, vocabulary):
        monkeypatch.setattr(module, "workspace_of", lambda *at: found)
    monkeypatch.setattr(embedding, "resolve_group", lambda name: Mock(rank=lambda: 0))
    monkeypatch.setattr(embedding.layouts, "check", lambda *shapes: None)
    monkeypatch.setattr(calls, "keep", lambda workspace, point: points.insert(0, point))

    def chosen(problem: Problem, workspace: Mock) -> Way:
        return ways_of(problem)[choice.choose(problem, choice.predictor_of(tuple(points))).way]

    monkeypatch.setattr(calls, "chosen", chosen)
    monkeypatch.setattr(choice, "predictor_for", lambda workspace: choice.predictor_of(tuple(points)))
    return found


@pytest.mark.parametrize("call", [*CALLS, *DENSE])
def test_names_and_what_auto_takes_of_them(call: str) -> None:
    op, arguments = (CALLS | DENSE)[call]
    plain = TORCH_NCCL if "bags" in call or call == "vocabulary" else CUBLAS_NCCL
    fused = by_name.names(op, arguments, False)
    assert len(fused) > 2
    assert plain not in fused
    assert by_name.names(op, arguments, True) == [plain, *fused]
    assert (MERGED_NCCL in fused) == (op in (OP, BACKWARD))
    by_name.keep(op, arguments, dict.fromkeys(fused, 99.0) | {plain: 9.0})
    assert by_name.chosen(op, arguments) == plain
    by_name.keep(op, arguments, {plain: 9.0, fused[-1]: 3.0, fused[0]: 4.0})
    assert by_name.chosen(op, arguments) == fused[-1]
    by_name.keep(op, arguments, {plain: 2.0, fused[-1]: 3.0})
    assert by_name.chosen(op, arguments) == plain


@pytest.mark.parametrize("call", ["dropless combine", "dropless dispatch"])
def test_the_configuration_that_told_rows_decide_is_named(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept counts for as many rows as ranks have told each other."""
    op, arguments = CALLS[call]
    fused = by_name.names(op, arguments, False)
    for rows, best in ((64, fused[-1]), (65536, fused[0])):
        monkeypatch.setattr(expert_ops, "last_told", lambda *key, rows=rows: replace(key[-1], rows=rows))
        by_name.keep(op, arguments, dict.fromkeys(fused, 99.0) | {best: 9.0, CUBLAS_NCCL: 200.0})
    assert by_name.chosen(op, arguments) == fused[0]
    monkeypatch.setattr(expert_ops, "last_told", lambda *key: replace(key[-1], rows=64))
    assert by_name.chosen(op, arguments) == fused[-1]


@pytest.mark.parametrize("call", CALLS)
def test_what_no_kernel_takes_has_no_names(call: str) -> None:
    op, arguments = CALLS[call]
    place, value = DECLINED[call]
    odd = (*arguments[:place], value, *arguments[place + 1 :])
    assert by_name.names(op, odd, True) == by_name.names(op, odd, False) == []


def test_where_nothing_is_shared_there_are_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_ops, "workspace_of", Mock(side_effect=NotShared("no")))
    assert by_name.names(*CALLS["combine"], True) == []


def test_an_unaligned_weight_has_no_names() -> None:
    op, arguments = CALLS["combine"]
    narrow = (_bf16(2, WORLD * 8, 63)[..., :60], _bf16(2, 60, 128))
    assert by_name.names(op, ([narrow[0]], [narrow[1]], *arguments[2:]), True) == []


RUNS = {
    "combine": (expert_ops, "combine"),
    "dispatch": (expert_ops, "dispatch"),
    "dropless combine": (expert_ops, "dropless_combine"),
    "dropless dispatch": (expert_ops, "dropless_dispatch"),
    "bags": (embedding, "exchange"),
    "bags, backward": (embedding, "exchange_backward"),
    "bags, reduced": (reduced, "reduce_bags"),
    "tokens": (token_rows, "reduced_of"),
    "vocabulary": (token_rows, "reduced_of"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_way_is_run_by_its_name(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, arguments = CALLS[call]
    lists = ("dispatch", "dropless dispatch", "bags, reduced")
    kernel = Mock(return_value=[_bf16(1)] if call in lists else _bf16(1))
    prepared = RUNS[call][0] is token_rows
    monkeypatch.setattr(*RUNS[call], (lambda *at: lambda of: kernel(*at)) if prepared else kernel)
    name = by_name.names(op, arguments, False)[-1]
    found = by_name.run(name, op, arguments)
    assert kernel.call_args.args[1].name == name
    first = found[0] if isinstance(found, list) else found
    assert torch.equal(cast(Tensor, first), _bf16(1))
    kernel.return_value = None
    with pytest.raises(RuntimeError, match="captured"):
        by_name.run(name, op, arguments)


@pytest.mark.parametrize("call", DENSE)
def test_a_dense_way_is_run_by_its_name(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the op replaces is such a way, too: the product is reduced in place."""
    op, arguments = DENSE[call]
    prepared = Mock(return_value=lambda *operands: [_bf16(1)])
    monkeypatch.setattr(dense, "Gather" if op == GATHER else "Reduction", prepared)
    for name in by_name.names(op, arguments, True):
        (found,) = by_name.run(name, op, arguments)
        assert prepared.call_args.args[1].name == name
        assert torch.equal(found, _bf16(1))


def test_empty_calls_have_no_dense_names() -> None:
    op, arguments = DENSE["scatter"]
    for odd in (
        ([_bf16(0, 64)], *arguments[1:]),
        ([torch.zeros(8, 64).double()], [torch.zeros(64, 8192).double()], *arguments[2:]),
    ):
        assert by_name.names(op, odd, True) == []


@pytest.mark.parametrize(
    ("x", "w", "operands", "product", "keep"),
    [
        (_bf16(8, 64), _bf16(64, 8192), [_bf16(8, 1)], "mm; add %0", False),
        (_bf16(8, 64), _bf16(64, 8192), [], "mm", True),
        (torch.zeros(8, 64), torch.zeros(64, 8192), [], "mm", False),
        (torch.zeros(8, 1, dtype=torch.int64), _bf16(10, 8192), [], "rows; mul 2", False),
        (torch.zeros(8, 1, dtype=torch.int64), _bf16(10, 8192), [], "rows", True),
    ],
)
def test_what_torch_computes_is_exchanged(
    x: Tensor, w: Tensor, operands: list[Tensor], product: str, keep: bool
) -> None:
    op, arguments = DENSE["scatter"]
    names = by_name.names(op, ([x], [w], operands, product, "avg", 0, 1, keep, *arguments[8:]), False)
    packets = {"row_packets"} if w.dtype == BF16 else set()
    assert {name.split()[0] for name in names} == {"sums", "rows"} | packets


@pytest.mark.parametrize("call", ["combine", "dispatch", "bags", "bags, reduced", "bags, backward"])
def test_what_the_op_replaces_is_run_by_its_name(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, arguments = CALLS[call]
    reference = Mock(return_value="torch's")
    monkeypatch.setitem(FUSED_OPS, op, replace(FUSED_OPS[op], reference=reference))
    assert by_name.run(by_name.names(op, arguments, True)[0], op, arguments) == "torch's"
    assert reference.call_args.args == (FUSED_OPS[op].parse(arguments),)


@pytest.mark.parametrize("call", ["dropless combine", "dropless dispatch"])
def test_dropless_ops_replace_what_reads_no_offsets_on_the_host(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, arguments = CALLS[call]
    grouped = Mock(return_value=_bf16(1))
    monkeypatch.setattr(expert_ops, "combine_unfused" if op == COMBINE else "dispatch_unfused", grouped)
    by_name.run(CUBLAS_NCCL, op, arguments)
    grouped.assert_called_once()


@pytest.mark.parametrize("call", ["bags, reduced", "tokens"])
def test_no_tail_is_applied_behind_sums_of_rows(call: str) -> None:
    """`Reduced` returns the sum alone."""
    op, arguments = CALLS[call]
    tailed = [*arguments]
    tailed[7] = "relu"
    assert "no tail" in FUSED_OPS[op].gpu_gap(FUSED_OPS[op].parse(tailed))
    assert not FUSED_OPS[op].gpu_gap(FUSED_OPS[op].parse(arguments))


def test_ways_that_gpu_tests_name_exist() -> None:
    """A name that is no more would fail on GPUs alone."""
    named = {way for way, *_ in (*test_optimizer.STEPS, *test_optimizer.LAMB_STEPS)}
    rules = product(("adam", "sgd", "lamb"), (False, True))
    problems = (UpdateProblem(6000, 3, rule, (BF16,) * 2, 2, 2, clips=clips) for rule, clips in rules)
    assert named <= {way for problem in problems for way in ways_of(problem)}

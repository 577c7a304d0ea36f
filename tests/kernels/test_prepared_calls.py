"""Every op's calls go on in one launch once one has been made; the driver only notes what it gets."""

import ctypes
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest

pytest.importorskip("triton")

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autofuse.lowering.gpu.choice.calls import GpuCall
from autofuse.lowering.gpu.choice.kernel import CUBLAS_NCCL, Way, ways_of
from autofuse.lowering.gpu.choice.launcher import Launcher
from autofuse.lowering.gpu.dense import call as dense
from autofuse.lowering.gpu.dense import factors
from autofuse.lowering.gpu.dense.factors import Factors
from autofuse.lowering.gpu.dense.run import Gather, Publication, Reduction
from autofuse.lowering.gpu.dense.tails import tail_of
from autofuse.lowering.gpu.dense.token_rows import Again, again_of, call_of, reduced_of
from autofuse.lowering.gpu.dense.ways import GATHER, PUBLISH, REDUCE, SCATTER, DenseProblem
from autofuse.lowering.gpu.embedding import call as embedding
from autofuse.lowering.gpu.embedding import vocabulary
from autofuse.lowering.gpu.embedding.call import tables_of
from autofuse.lowering.gpu.embedding.run import Exchange
from autofuse.lowering.gpu.embedding.vocabulary import VocabularyProblem
from autofuse.lowering.gpu.embedding.ways import OP as EMBEDDING
from autofuse.lowering.gpu.embedding.ways import ExchangeProblem
from autofuse.lowering.gpu.experts import call as experts
from autofuse.lowering.gpu.experts import dropless
from autofuse.lowering.gpu.experts import reduced as experts_reduced
from autofuse.lowering.gpu.experts.dropless import DroplessCombine, DroplessDispatch
from autofuse.lowering.gpu.experts.fixed import Combine, Dispatch
from autofuse.lowering.gpu.experts.kernels import Rows
from autofuse.lowering.gpu.experts.reduced import TokensProblem
from autofuse.lowering.gpu.experts.ways import COMBINE, DISPATCH, DROPLESS, DroplessProblem, ExpertProblem
from autofuse.lowering.gpu.memory.descriptors import Descriptors
from autofuse.lowering.gpu.operands import ALIGNED, aligned
from autofuse.lowering.ops.library import FUSED_OPS
from autofuse.lowering.reference import product
from autofuse.native_kernels.cuda.kernels.dropless_combine import dropless_combine_needs
from autofuse.native_kernels.cuda.kernels.dropless_dispatch import _Params as DispatchParams
from autofuse.native_kernels.cuda.kernels.dropless_dispatch import dropless_dispatch_needs
from autofuse.native_kernels.gpu import prepared
from autofuse.native_kernels.gpu.prepared import recording
from autofuse.native_kernels.gpu.state import MOST_TAIL_COLUMNS
from tests.kernels.faked_driver import Driver, Words, faked
from tests.kernels.launched import peer_memory

pytestmark = pytest.mark.skipif(prepared.library() is None, reason="launch.cpp is not built")

K, N, WORLD = 512, 2048, 2


def _workspace(driver: Driver, way: Way) -> Any:
    """As `GpuWorkspace`, of one rank of two."""
    words = Words()
    memory = peer_memory(WORLD, way.need)
    found: Any = Mock(
        serial=False, device=torch.device("cpu", 0), rank=0, calls={}, world=WORLD, programs=132
    )  # fmt: skip
    found.again = SimpleNamespace(
        guard=words.guard, unchanged=lambda: True, is_last=lambda stream: words.last.value == stream
    )
    found.enter.return_value, found.enter_again.return_value = (memory, 5, False), memory
    found.group = Group()
    found.descriptors = Descriptors(driver.put, lambda size: torch.zeros(size, dtype=torch.int64))
    return found


class Group:
    """In place of a process group."""


def _rows(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def _dense(call: str, m: int, way: str, given: tuple[Any, ...], **more: Any) -> tuple[Any, ...]:
    op = call.split(", ")[0]
    problem = DenseProblem(op, m, K, N, WORLD, **{"dtype": torch.bfloat16, **more})
    return (
        problem,
        way,
        lambda workspace, found: MAKE[call](workspace, found, problem),
        dense.QUICK[op],
        given,
    )


KEPT = f"{GATHER}, kept"
"""X is kept, which a second kernel stores, and a second weight is multiplied by torch."""

PRODUCT = f"{REDUCE}, product"
"""cuBLAS multiplies, and a kernel adds up."""

NORM = "add %0; keep; to float32; rms 1e-06 keep; to bfloat16; mul %1"
BIASED, BIASED_PRODUCT = f"{REDUCE}, biased", f"{SCATTER}, biased product"
"""Each rank adds a row to its product: the kernel does, or cuBLAS."""

SCALED = f"{SCATTER}, scaled"
"""A kernel scales the product."""

TOKENS, VOCABULARY = f"{REDUCE}, tokens", f"{SCATTER}, vocabulary"
"""A kernel adds up rows of experts, which are returned, too, or reads rows of a table."""

CAST = f"{REDUCE}, cast"
"""Each rank scales and casts its product, which is returned, too."""

TAILS = {f"{REDUCE}, tail": 2, f"{SCATTER}, tail": 2, f"{SCATTER}, tail within": 1}
"""Launches of a call: its kernel, and one that applies the tail."""


def _again(added_rows: Callable[..., Any], op: str, call: str) -> Callable[..., Again]:
    """As the op makes it of the arguments of a call."""

    def make(workspace: Any, way: Way, problem: Any) -> Again:
        *given, _, _, _ = CALLS[call][-1]
        args = FUSED_OPS[op].parse((*given, *END))
        with patch.object(sys.modules[added_rows.__module__], "workspace_of", lambda *at: workspace):
            added = added_rows(op, args)
        assert added is not None
        assert added.problem == problem
        of = added.rows(args.x, args.w, args.operands)
        return Again(added, reduced_of(added, way, of, False, "s"), args.keep_product)

    return make


def _with_tail(*at: Any) -> Reduction:
    """Its operands are a residual and a weight."""
    problem = at[2]
    rows = problem.m // (1 if problem.everywhere else WORLD)
    tail = tail_of(NORM, torch.bfloat16, rows, [_rows(rows, N), _rows(N)])
    return Reduction(*at, (1, K), False, "direct", "s", tail=tail)


MAKE: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(TAILS, _with_tail),
    REDUCE: lambda *at: Reduction(*at, (1, K), False, "direct", "s"),
    **dict.fromkeys(
        (PRODUCT, BIASED, BIASED_PRODUCT, SCALED), lambda *at: Reduction(*at, (1, K), False, "direct", "s")
    ),
    TOKENS: _again(experts_reduced.added_rows, REDUCE, TOKENS),
    VOCABULARY: _again(vocabulary.added_rows, SCATTER, VOCABULARY),
    CAST: lambda *at: Reduction(*at, (1, K), False, "direct", "s", keep=True),
    SCATTER: lambda *at: Reduction(*at, (1, K), False, "direct", "s"),
    GATHER: lambda *at: Gather(*at, (1, K), False, False, "s", biased=True),
    KEPT: lambda *at: Gather(*at, (1, K), True, True, "s", biased=True),
    PUBLISH: lambda *at: Publication(*at, (1, K), True, "s"),
}
END = ("g", "direct", "s")
WEIGHT, BIAS = _rows(N, K).t(), _rows(N)
EXPERTS = [_rows(2, 256, 512)], [_rows(2, 512)]
FIXED = ExpertProblem(COMBINE, 2, 64, 256, 512, WORLD, torch.bfloat16)
BAGS = ExchangeProblem(64, (32, 32), "bsc", torch.bfloat16, 132)
CALLS = {
    REDUCE: _dense(REDUCE, 8, "words", ([_rows(8, K)], [WEIGHT], [], "mm", "sum", False, [], "", "", *END)),
    SCATTER: _dense(
        SCATTER, 8, "packets", ([_rows(8, K)], [WEIGHT], [], "mm", "sum", 0, 1, False, [], "", "", *END)
    ),
    f"{REDUCE}, tail": _dense(
        f"{REDUCE}, tail", 8, "words",
        ([_rows(8, K)], [WEIGHT], [], "mm", "sum", False, [_rows(8, N), _rows(N)], NORM, "", *END),
    ),
    f"{SCATTER}, tail": _dense(
        f"{SCATTER}, tail", 8, "packets",
        ([_rows(8, K)], [WEIGHT], [], "mm", "sum", 0, 1, False, [_rows(4, N), _rows(N)], NORM, "", *END),
    ),
    f"{SCATTER}, tail within": _dense(
        f"{SCATTER}, tail within", 8, "rows",
        ([_rows(8, K)], [WEIGHT], [], "mm", "sum", 0, 1, False, [_rows(4, N), _rows(N)], NORM, "", *END),
    ),
    PRODUCT: _dense(PRODUCT, 8, "rows", ([_rows(8, K)], [WEIGHT], [], "mm", "sum", False, [], "", "", *END)),
    BIASED: _dense(
        BIASED, 8, "words",
        ([_rows(8, K)], [WEIGHT], [BIAS], "addmm %0", "sum", False, [], "", "", *END), product=factors.BIASED,
    ),
    BIASED_PRODUCT: _dense(
        BIASED_PRODUCT, 8, "rows",
        ([_rows(8, K)], [WEIGHT], [BIAS], "addmm %0", "sum", 0, 1, False, [], "", "", *END),
        product=factors.BIASED,
    ),
    SCALED: _dense(
        SCALED, 512, "clusters",
        ([_rows(512, K)], [WEIGHT], [], "mm; div 4", "sum", 0, 1, False, [], "", "", *END),
        product=factors.SCALED,
    ),
    TOKENS: (
        TokensProblem(REDUCE, 8, 64, WORLD, torch.bfloat16, 132, True, 2, 2, 32),
        "tokens",
        lambda workspace, found: MAKE[TOKENS](workspace, found, CALLS[TOKENS][0]),
        dense.QUICK[REDUCE],
        (
            [_rows(16, 32)], [_rows(2, 32, 64)],
            [torch.tensor([[7], [16]], dtype=torch.int32), torch.arange(16)[:, None], torch.ones(16, 1)],
            "grouped %0; take %1; mul %2; sum 2; to bfloat16", "sum", True, [], "", "", *END,
        ),
    ),
    VOCABULARY: (
        VocabularyProblem(SCATTER, 8, 64, WORLD, torch.bfloat16, 132, True),
        "token_packets",
        lambda workspace, found: MAKE[VOCABULARY](workspace, found, CALLS[VOCABULARY][0]),
        dense.QUICK[SCATTER],
        (
            [torch.arange(8)[:, None]], [_rows(10, 64)], [torch.zeros(8, 1, dtype=torch.bool)],
            "rows; where %0 0.0", "sum", 0, 1, False, [], "", "", *END,
        ),
    ),
    CAST: _dense(
        CAST, 8, "rows",
        ([_rows(8, K)], [WEIGHT], [_rows(8, N)], "mm; add %0; to float32", "sum", True, [], "", "", *END),
        product=factors.MADE, dtype=torch.float32,
    ),
    GATHER: _dense(GATHER, 64, "few", (_rows(32, K), [WEIGHT], [BIAS], 0, 1, False, *END)),
    KEPT: _dense(KEPT, 64, "few", (_rows(32, K), [WEIGHT, WEIGHT], [BIAS, BIAS], 0, 1, True, *END)),
    PUBLISH: _dense(
        PUBLISH, 8, "packets", ([_rows(8, K)], [WEIGHT], [BIAS], "addmm %0", 1, 1, False, False, *END), dim=1
    ),
    COMBINE: (
        FIXED,
        "clusters",
        lambda workspace, way: Combine(workspace, way, FIXED, None, "direct", "s"),
        experts.QUICK[COMBINE],
        ([_rows(2, 64, 256)], *EXPERTS, [], "mm", 0, None, None, [], [], 1, 1, False, *END),
    ),
    DISPATCH: (
        replace(FIXED, op=DISPATCH),
        "clusters",
        lambda workspace, way: Dispatch(workspace, way, replace(FIXED, op=DISPATCH), None, False, False, "s"),
        experts.QUICK[DISPATCH],
        (_rows(WORLD, 2, 32, 256), *EXPERTS, "", 0, None, None, [], [], 1, 1, False, *END),
    ),
    EMBEDDING: (
        BAGS,
        "bags",
        lambda workspace, way: Exchange(workspace, way, BAGS, None, [16, 16], "s"),
        embedding.QUICK[EMBEDDING],
        (
            [_rows(10, 16), _rows(20, 16)], [torch.zeros(9, dtype=torch.int64)] * 2,
            [torch.arange(128)] * 2, [], 0, False, -1, torch.bfloat16, [32, 32], "bsc", *END,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", [COMBINE, DISPATCH])
def test_dropless_calls_of_any_number_of_rows_are_of_one_kind(op: str) -> None:
    """They find what earlier ones have prepared, and tell the kernel their own rows."""
    problem = DroplessProblem(op + DROPLESS, 2, 256, 512, WORLD, torch.bfloat16, 132)
    way = next(way for name, way in ways_of(problem).items() if name.startswith("clusters"))
    needs = dropless_combine_needs if op == COMBINE else dropless_dispatch_needs
    w, cuda = torch.empty(2, 256, 512, dtype=torch.bfloat16), {"is_current_stream_capturing": lambda: False}
    quick = experts.QUICK[op]

    def given(rows: int, received: int, offsets: torch.dtype = torch.int32) -> tuple[Any, ...]:
        ends, x = torch.zeros(2, dtype=offsets), _rows(rows, 256)
        places = torch.arange(rows if op == COMBINE else received)
        splits = [received, 0], [rows - 1, 1]
        if op == COMBINE:
            return [x], [w], [], [], "mm", 0, ends, places, *splits, 0, 1, False, *END
        return x, [w], [], "", 0, ends, places, *splits, 0, 1, False, *END

    def telling(workspace: Any, op: str, site: str, rows: Sequence[int]) -> Sequence[int]:
        return rows

    with faked(), patch.multiple(torch.cuda, **cuda, current_device=lambda: 0):
        workspace = _workspace(Driver(), replace(way, need=needs(1 << 12, 512, WORLD)))
        called: Any = DroplessCombine if op == COMBINE else DroplessDispatch
        made = called(op, workspace, way, problem, None, "s")
        with patch.object(dropless, "told_by_all", side_effect=telling) as told:
            assert quick.again(made, given(100, 120)) is None  # nothing has been prepared
            x, rows = _rows(100, 256), Rows(torch.zeros(2, dtype=torch.int32), None, [120, 0], [99, 1])
            made(*(([x], [w], None, rows) if op == COMBINE else (x, [w], [None], rows, False)))
            for sent, received, times in ((100, 120, 1), (7, 2000, 2)):
                (out,) = quick.again(made, given(sent, received))
                assert out.shape == (received, 512)
                assert workspace.enter.call_count == times  # a kernel's memory has grown, or not
            assert told.call_count == 3
        assert quick.kind(given(100, 120)) == quick.kind(given(7, 2000))
        assert quick.kind(given(100, 120, torch.int64)) is None  # it is converted first
        wrong = list(given(100, 120))
        wrong[9 if op == COMBINE else 7] = [1, 2]
        assert quick.again(made, tuple(wrong)) is None


@pytest.mark.parametrize("named", [False, True])
def test_the_rows_of_the_busiest_rank_decide_the_configuration(named: bool) -> None:
    """Unless it was named. Calls of as many rows, up to a power of two, go on with it."""
    problem = DroplessProblem(COMBINE + DROPLESS, 2, 256, 512, WORLD, torch.bfloat16, 132)
    ways = [way for name, way in ways_of(problem).items() if name.startswith("clusters")]
    busiest, asked = 5000, []
    cuda: Any = {"is_current_stream_capturing": lambda: False, "current_device": lambda: 0}

    def configuration(way: Way, problem: DroplessProblem, workspace: Any) -> Way:
        asked.append(problem.rows)
        return ways[1 if problem.rows > 4096 else 2]

    told = patch.multiple(
        dropless, told_by_all=lambda *given: (given[-1][0], busiest), configuration=configuration
    )
    with faked(), patch.multiple(torch.cuda, **cuda), told:
        workspace = _workspace(Driver(), replace(ways[0], need=dropless_combine_needs(1 << 12, 512, WORLD)))
        made = DroplessCombine(COMBINE, workspace, ways[0], problem, None, "s", named)
        w, rows = torch.empty(2, 256, 512, dtype=torch.bfloat16), Rows(None, None, [120, 0], [99, 1])
        for busiest in (5000, 8192, 4000, 5000):  # noqa: B007  # `told_by_all` reads it
            made([_rows(100, 256)], [w], None, rows)
        entered = [call.args[3] for call in workspace.enter.call_args_list]
    assert asked == ([] if named else [8192, 4096])
    assert entered == ([ways[0].name] * 2 if named else [ways[1].name, ways[2].name])


@pytest.mark.parametrize(("gated", "kept", "products"), [(0, 0, 2), (1, 0, 1), (1, 1, 3)])
def test_a_dropless_dispatch_goes_the_short_way_with_its_own_rows(
    gated: bool, kept: bool, products: int
) -> None:
    """Each height of tiles, which depends on the rows of this rank, has a start; calls without rows none."""
    experts, k, n = 2, 256, 512
    problem = DroplessProblem(DISPATCH + DROPLESS, experts, k, n, WORLD, torch.bfloat16, 132, weights=2)
    problem = replace(problem, gated=gated, kept=kept)
    way = next(way for name, way in ways_of(problem).items() if name.startswith("clusters"))
    w, ends = [torch.empty(experts, k, n, dtype=torch.bfloat16) for _ in range(2)], torch.zeros(experts)
    none, cuda = [None, None], {"is_current_stream_capturing": lambda: False, "current_device": lambda: 0}

    def called(received: int, sent: int, keep: bool) -> tuple[Any, ...]:
        rows = Rows(ends.int(), torch.arange(received), [received, 0], [sent - sent // 3, sent // 3])
        return _rows(sent, k), w, none, rows, keep

    def parameters(given: bytes) -> Any:
        return DispatchParams.from_buffer_copy(given[: ctypes.sizeof(DispatchParams)])

    told = patch.object(dropless, "told_by_all", lambda *given: given[-1])
    with faked() as driver, patch.multiple(torch.cuda, **cuda), told:
        workspace = _workspace(driver, replace(way, need=dropless_dispatch_needs(1 << 12, k, WORLD)))
        made = DroplessDispatch(DISPATCH, workspace, way, problem, None, "s")
        for received, sent, keep in (
            (120, 100, False), (110, 3, True), (1000, 70, False), (900, 80, True), (0, 90, True),
            (110, 0, False), (100, 90, False),
        ):  # fmt: skip
            given, before = called(received, sent, keep), len(driver.launches)
            for _ in range(2):
                made(*given)
            with recording() as launches:
                made(*given)
            (long,) = launches
            assert long is not None
            driver.sizes = [[len(long.params)]]
            workspace.leave_again.reset_mock()
            outputs = made.again(*given)
            assert outputs is not None
            assert [y.shape for y in outputs] == [(received, n)] * products + [(received, k)] * keep
            assert workspace.leave_again.called == (keep and received > 0)
            if not (received and sent):
                assert len(driver.launches) == before
                continue
            found, like = parameters(driver.launches[before][-1][0]), parameters(long.params)
            assert list(found.out)[:products] == [y.data_ptr() for y in outputs[:products]]
            assert (found.parts, found.offsets) == (like.parts, like.offsets)
            assert (found.positions, found.rows) == (like.positions, like.rows)
            assert (*found.sent, *found.received) == (*like.sent, *like.received)


def _run(op: str, made: Any, given: tuple[Any, ...]) -> Any:
    """The long way."""
    x, w, more, *_ = given
    if op in (TOKENS, VOCABULARY):
        of = made._rows(x, w, more)
        return [made._reduced(of), *([of.rows] if op == TOKENS else [])]
    if op.split(",")[0] in (REDUCE, SCATTER):
        return made(Factors(x, w, more, given[3], made.kind), given[-6])
    if op == PUBLISH:
        return [made(x[0], w[0], more[0])]
    if op == EMBEDDING:
        return made(tables_of(*given[:4], 0, False, -1))
    return made(x, w, more[0] if op == COMBINE else more)


def _moved(given: Any, by: int) -> Any:
    """Operands laid out like these, so many elements behind the beginning of their storage."""
    if not isinstance(given, Tensor):
        return [_moved(t, by) for t in given]
    storage = torch.empty(by + given.numel(), dtype=given.dtype)
    return storage.as_strided(given.shape, given.stride(), by)


def test_operands_are_copied_only_if_kernels_cannot_read_them() -> None:
    whole = torch.randn(4, 64).bfloat16()
    for t in (whole, whole[1:], whole.flatten()[8:16]):
        assert aligned(t) is t
    for t in (whole.flatten()[1:9], whole[:, :8], whole.t()):
        found = aligned(t)
        assert found.is_contiguous()
        assert found.data_ptr() % ALIGNED == 0
        assert torch.equal(found, t)


@contextmanager
def _calls_in(way: Way) -> Iterator[tuple[Any, list[list[Tensor]]]]:
    """The workspace of calls of `run_reduce` that take the way; and what each launch gets in place of x."""
    launch, launched = Launcher.launch, list[list[Tensor]]()

    def noted(launcher: Launcher, x: Any, *operands: Any, **more: Any) -> Any:
        launched.append(list(x))
        return launch(launcher, x, *operands, **more)

    cuda = {"is_current_stream_capturing": lambda: False, "current_device": lambda: 0}
    with faked() as driver, patch.multiple(torch.cuda, **cuda), ExitStack() as stack:
        enter, workspace = stack.enter_context, _workspace(driver, way)
        enter(patch.object(dense, "current", lambda device: nullcontext()))
        enter(patch.object(dense, "workspace_for", lambda *at: workspace))
        enter(patch.multiple(GpuCall, decide=lambda call, capturing: (way, True), note=Mock()))
        enter(patch.object(Launcher, "launch", noted))
        enter(patch.object(dist, "all_reduce"))
        yield workspace, launched


class _Copies(TorchDispatchMode):
    """How often a tensor is copied."""

    def __init__(self, t: Tensor) -> None:
        super().__init__()
        self._at, self.count = t.data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copies = func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default)
        self.count += copies and any(isinstance(t, Tensor) and t.data_ptr() == self._at for t in args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["words", "packets", "rows", "sums", "row_packets", CUBLAS_NCCL])
def test_a_transposed_x_is_copied_for_kernels_that_read_it(kind: str) -> None:
    """As of a gradient of a weight, `grad.t() @ x`. Where torch multiplies, it takes any strides."""
    problem = DenseProblem(REDUCE, 8, K, N, WORLD, torch.bfloat16)
    way = next(way for name, way in ways_of(problem).items() if name.split()[0] == kind)
    x, w = torch.randn(K, 8).bfloat16().t(), torch.randn(N, K).bfloat16().t()
    rest = ([w], [], "mm", "sum", False, [], "", "", *END)
    given = [((each,), *rest) for each in (x, x.contiguous(), x)]
    reads, calls = kind in ("words", "packets"), 3
    with _calls_in(way) as (workspace, launched):
        for each in given:
            with _Copies(x) as copies:
                for _ in range(calls):
                    (y,) = dense.run_reduce(REDUCE, FUSED_OPS[REDUCE].parse((list(each[0]), *each[1:])))
            assert copies.count == (calls if reads and each[0][0] is x else 0)
        # All calls have one kind. Only a call whose x needs no copy takes the short way.
        (made,) = workspace.calls.values()
        keys = [dense.QUICK[REDUCE].kind(each) for each in given]
        assert keys[0] is None
        assert keys[1] is not None
        assert dense.QUICK[REDUCE].made(workspace, FUSED_OPS[REDUCE].parse(given[1])) is made
    assert len(launched) == (0 if kind == CUBLAS_NCCL else calls * len(given))
    for (read,) in launched:
        assert read.is_contiguous()
        torch.testing.assert_close(read, x if reads else x @ w, rtol=2e-2, atol=1.0)
    if kind == CUBLAS_NCCL:
        torch.testing.assert_close(y, x @ w, rtol=2e-2, atol=1.0)


def test_a_transposed_x_of_float8_is_copied() -> None:
    """`torch._scaled_mm` takes no other x than rows."""
    x, w = torch.zeros(K, 8).to(torch.float8_e4m3fn).t(), torch.zeros(N, K).to(torch.float8_e4m3fn).t()
    scales = [torch.ones(()), torch.ones(())]
    given = ([x], [w], scales, "scaled_mm %0 %1 bfloat16", "sum", False, [], "", "", *END)
    problem = DenseProblem(REDUCE, 8, K, N, WORLD, torch.bfloat16, product=factors.MADE)
    way = next(way for name, way in ways_of(problem).items() if name.startswith("rows"))
    multiplied = Mock(return_value=_rows(8, N))
    with _calls_in(way), patch.object(product, "scaled_mm", multiplied):
        dense.run_reduce(REDUCE, FUSED_OPS[REDUCE].parse(given))
    read = multiplied.call_args.args[0]
    assert read.is_contiguous()
    assert read.shape == x.shape


def test_what_is_measured_of_a_transposed_x_has_no_copy_in_it() -> None:
    problem = DenseProblem(REDUCE, 8, K, N, WORLD, torch.bfloat16)
    x, w = torch.randn(K, 8).bfloat16().t(), torch.randn(N, K).bfloat16().t()
    args = FUSED_OPS[REDUCE].parse(([x], [w], [], "mm", "sum", False, [], "", "", *END))
    for kind, copied in (("rows", 0), ("words", 1)):
        way = next(way for name, way in ways_of(problem).items() if name.split()[0] == kind)
        with _calls_in(way) as (workspace, _), _Copies(x) as copies:
            with patch.object(dense, "workspace_of", lambda *at, workspace=workspace: workspace):
                call = dense.reduce_call(REDUCE, args)
            assert call is not None
            for _ in range(3):
                call.run_named(way)
        assert copies.count == copied


def test_rows_that_no_program_holds_get_their_tail_behind_the_short_way() -> None:
    wide = MOST_TAIL_COLUMNS + 8
    problem = DenseProblem(REDUCE, 8, K, wide, WORLD, torch.bfloat16)
    way = next(way for name, way in ways_of(problem).items() if name.startswith("packets"))
    x, w, residual = [_rows(8, K)], [_rows(wide, K).t()], _rows(8, wide)
    tail = tail_of("add %0; keep; relu", torch.bfloat16, 8, [residual])
    cuda = {"is_current_stream_capturing": lambda: False, "current_device": lambda: 0}
    with faked() as driver, patch.multiple(torch.cuda, **cuda):
        made = Reduction(_workspace(driver, way), way, problem, (1, K), False, "direct", "s", tail=tail)
        for _ in range(2):
            made(Factors(x, w), [residual])
        results = made.again(Factors(x, w), [residual])
        assert results is not None
        assert [t.shape for t in results] == [residual.shape] * 2
        assert len(driver.launches) == 1


def test_how_rows_of_experts_are_added_up_is_found_once_a_call() -> None:
    """Of later calls anew: nothing keeps the tensors of the first."""
    problem, kind, _, _, given = CALLS[TOKENS]
    way = next(way for name, way in ways_of(problem).items() if name.split()[0] == kind)
    x, w, (ends, index, factors) = given[0], given[1], given[2]
    first, later = ([ends, index, factors * number] for number in (1, 2))
    args = FUSED_OPS[REDUCE].parse((x, w, first, *given[3:]))
    cuda = {"is_current_stream_capturing": lambda: False, "current_device": lambda: 0}
    with faked() as driver, patch.multiple(torch.cuda, **cuda), ExitStack() as stack:
        workspace = _workspace(driver, way)
        stack.enter_context(patch.object(experts_reduced, "workspace_of", lambda *at: workspace))
        token_sum = Mock(wraps=experts_reduced.token_sum)
        stack.enter_context(patch.object(experts_reduced, "token_sum", token_sum))
        for calls in (1, 2):
            added = experts_reduced.added_rows(REDUCE, args)
            call = call_of(REDUCE, args, added)
            assert call is not None
            assert call.run(way) is not None
            assert token_sum.call_count == calls
        workspace.calls[call.kind] = way
        again = again_of(REDUCE, args, added)
        assert again is not None
        assert token_sum.call_count == 2
        kept = weakref.ref(first[2])
        del args, first, added, call
        token_sum.reset_mock()
        gc.collect()
        assert kept() is None
        assert again.again(x, w, later) is not None
        assert token_sum.call_args.args[1] is later


@pytest.mark.parametrize("op", list(CALLS))
def test_a_call_goes_on_the_short_way(op: str) -> None:
    """Of every op: as `lowering/direct.py` asks for it, with the result of the long way."""
    problem, kind, make, quick, given = CALLS[op]
    way = next(way for name, way in ways_of(problem).items() if name.split()[0] == kind and not way.is_copied)
    cuda = {"is_current_stream_capturing": lambda: False, "current_device": lambda: 0}
    with faked() as driver, patch.multiple(torch.cuda, **cuda):
        workspace = _workspace(driver, way)
        made = make(workspace, way)
        assert made.group() is workspace.group
        for _ in range(2):
            long = _run(op, made, given)
        assert not driver.launches
        key = quick.kind(given)
        assert key == quick.kind(given)
        assert {key: 1}
        short = quick.again(made, given)
        assert short is not None
        assert len(driver.launches) == TAILS.get(op, 1 + (op == KEPT))
        assert driver.dependent == [TAILS.get(op) == 2] * len(driver.launches)
        for a, b in zip(*([t] if isinstance(t, Tensor) else t for t in (short, long)), strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        if op in TAILS:
            proofs = [
                FUSED_OPS[problem.op].parse((*given[:-4], proof, *given[-3:])) for proof in ("", "same")
            ]
            first, second = (dense._reduce_kind(problem.op, args, args.x, False) for args in proofs)
            assert first != second  # graphs of one line may differ in it
        for i in range(2 * (op != EMBEDDING)):  # no operand of TMA: its way may be another one
            assert quick.kind((*given[:i], _moved(given[i], 1), *given[i + 1 :])) != key
            assert quick.kind((*given[:i], _moved(given[i], 8), *given[i + 1 :])) == key
        if op != EMBEDDING and given[2]:  # kernels read several entries of a bias at once
            assert quick.kind((*given[:2], _moved(given[2], 8), *given[3:])) == key
            assert quick.kind((*given[:2], _moved(given[2], 1), *given[3:])) is None
        if op == EMBEDDING:
            others = [torch.zeros(7, dtype=torch.int64) for _ in range(2)]
            puts = driver.puts
            assert quick.again(made, (given[0], others, *given[2:])) is not None
            assert driver.puts == puts + 1
            assert quick.kind((*given[:3], others, *given[4:])) is None

"""Launches that are made again, with a driver that only notes what it gets: the same as the long way gives.

Kernels are not compiled; a tensor map is its address and zeros.
"""

import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor

from autofuse.lowering.gpu.choice.kernel import Launch, Problem, Way, ways_of
from autofuse.lowering.gpu.choice.launcher import Launcher, _tensors, contiguous
from autofuse.lowering.gpu.dense.factors import BIASED, SCALED
from autofuse.lowering.gpu.dense.reductions import Reduce
from autofuse.lowering.gpu.dense.token_rows import tensors_of
from autofuse.lowering.gpu.dense.ways import GATHER, PUBLISH, REDUCE, SCATTER, DenseProblem
from autofuse.lowering.gpu.experts.kernels import Fixed
from autofuse.lowering.gpu.experts.reduced import TokensProblem
from autofuse.lowering.gpu.experts.ways import COMBINE, DISPATCH, ExpertProblem
from autofuse.native_kernels.gpu import prepared
from autofuse.native_kernels.gpu.commands import Command, Do
from autofuse.native_kernels.gpu.copy_engine import CopyEngine
from autofuse.native_kernels.gpu.dependent import dependent_launches
from autofuse.native_kernels.gpu.memory import launch
from autofuse.native_kernels.gpu.prepared import Launched, Part, prepare, recording
from autofuse.native_kernels.triton.exchange_tokens import TokenRows
from tests.kernels.faked_driver import EVENT, STREAM, Words, faked
from tests.kernels.launched import peer_memory

pytestmark = pytest.mark.skipif(prepared.library() is None, reason="launch.cpp is not built")

K, N, WORLD = 512, 2048, 2
OPS = (REDUCE, SCATTER, GATHER, PUBLISH)
STARTED, FAILED, OTHER_STREAM, CAPTURING, OTHER_MEMORY, MISPLACED, REFUSED = range(7)


def _operands(problem: DenseProblem, keeps: bool = False) -> tuple[Any, ...]:
    """As a kernel of the op is launched. keeps: a gather stores X, too."""
    m, world, dtype = problem.m, problem.world, problem.dtype

    def new(rows: int, cols: int) -> Tensor:
        return torch.empty(rows, cols, dtype=dtype)

    if problem.op in (REDUCE, SCATTER):
        lengths = problem.terms or (problem.k,)
        x, w = [new(m, k) for k in lengths], [new(N, k).t() for k in lengths]
        out = new(m // world if problem.op == SCATTER else m, N)
        return x, w, out, Reduce(False, problem.everywhere, 1, 0)
    if problem.op == PUBLISH:
        return new(m, K), new(N, K).t(), new(m, world * N), torch.empty(N, dtype=dtype), 1, 1
    w, out = [new(n, K).t() for n in problem.columns], [new(m, n) for n in problem.columns]
    biases = [torch.empty(n, dtype=dtype) for n in problem.columns]
    return new(m // world, K), w, out, new(m, K) if keeps else None, biases, 1


def _long(way: Way, at: Launch, operands: tuple[Any, ...]) -> list[Part]:
    """The parts of a call the long way."""
    assert way.kernel is not None
    with recording() as launches:
        way.kernel.launch(at, way.config, *operands)
    assert None not in launches
    return launches


def _kernels(parts: list[Part]) -> list[Launched]:
    return [part for part in parts if isinstance(part, Launched)]


def _params(launched: Launched, sizes: list[int]) -> list[bytes]:
    return [launched.params[at : at + size] for at, size in zip(launched.offsets, sizes, strict=True)]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("m", [8, 128, 2048])
def test_a_launch_again_has_the_parameters_of_the_long_way(op: str, m: int, several: bool) -> None:
    """Every way of ours that only launches, with operands at other places; several: terms or weights."""
    problem = DenseProblem(op, m, K, N, WORLD, torch.bfloat16, dim=1 if op == PUBLISH else 0)
    if several:
        if op == PUBLISH or (op == GATHER and m <= 128):
            return  # one each
        many = {"n": N + 768, "widths": (N, 512, 256)} if op == GATHER else {"k": K + 64, "terms": (K, 64)}
        problem = replace(problem, **many)
    for keeps in (False, True)[: 1 + (op == GATHER)]:
        check_ways(problem, lambda keeps=keeps: _operands(problem, keeps))  # type: ignore[misc]


@pytest.mark.parametrize("kind", [BIASED, SCALED])
@pytest.mark.parametrize("op", [REDUCE, SCATTER])
@pytest.mark.parametrize("m", [8, 2048])
def test_launches_of_products_with_a_stage(op: str, m: int, kind: str) -> None:
    problem = DenseProblem(op, m, K, N, WORLD, torch.bfloat16, product=kind)

    def operands() -> tuple[Any, ...]:
        *given, how = _operands(problem)
        if kind == SCALED:
            return *given, how._replace(scale=0.5)
        return *given, how._replace(bias=torch.empty(N, dtype=torch.bfloat16))

    check_ways(problem, operands)


@pytest.mark.parametrize("op", [REDUCE, SCATTER])
@pytest.mark.parametrize("given", ["index behind", "index before added", ""])
def test_launches_of_added_rows(op: str, given: str) -> None:
    """Of experts; what a token lacks has the address of the rows."""
    tokens, top, n = 64, 2, 256
    problem = TokensProblem(op, tokens, n, WORLD, torch.bfloat16, 132, True, 8, top, K)

    def operands() -> tuple[Any, ...]:
        def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(shape, dtype=dtype)

        factors = {name: new(tokens * top, 1) if name in given else None for name in ("before", "behind")}
        of = TokenRows(
            new(tokens * top, n), new(tokens * top, dtype=torch.int64) if "index" in given else None,
            factors["before"], factors["behind"], new(tokens, n) if "added" in given else None,
            tokens, top, False,
        )  # fmt: skip
        out = new(tokens if op == REDUCE else tokens // WORLD, n)
        return tensors_of(of), out, of, False, op == REDUCE

    check_ways(problem, operands)


@pytest.mark.parametrize("op", [COMBINE, DISPATCH])
@pytest.mark.parametrize("rows", [32, 1024])
@pytest.mark.parametrize("biased", [False, True])
def test_launches_of_experts(op: str, rows: int, biased: bool) -> None:
    """As the above, of a sum of two products, and with two weights."""
    count, k, n = 2, 256, 512
    weights, k_all = (1, 2 * k) if op == COMBINE else (2, k)
    problem = ExpertProblem(op, count, rows, k_all, n, WORLD, torch.bfloat16, weights=weights)

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16)

    def operands() -> tuple[Any, ...]:
        w, bias = [new(count, k, n) for _ in range(2)], [new(count, n) for _ in range(2 * biased)]
        if op == COMBINE:
            x, out = [new(count, rows, k) for _ in range(2)], new(WORLD, count, rows // WORLD, n)
            return x, w, out, bias[0] if biased else None, Fixed(1)
        out = [new(count, rows, n) for _ in range(2)]
        return new(WORLD, count, rows // WORLD, k), w, out, bias, Fixed(1)

    check_ways(problem, operands)


def check_ways(problem: Problem, operands: Callable[[], tuple[Any, ...]]) -> None:
    """All ways of a problem."""
    ways = [way for way in ways_of(problem).values() if way.kernel is not None]
    assert ways
    for way in ways:
        assert way.kernel is not None
        assert way.kernel.only_launches(way.config), way.name
        with faked() as driver:
            words = Words()
            first, second = (_given(way.kernel.takes_product, operands()) for _ in range(2))
            memory = peer_memory(WORLD, way.need)
            at = Launch(memory, CopyEngine(memory) if way.is_copied else Mock(), 5, None, False)
            parts = _long(way, at, first)
            launched = _kernels(parts)
            start = prepare(parts, _tensors(first), words.guard)
            assert start is not None, way.name
            driver.sizes = [_sizes(each) for each in launched]
            driver.calls.clear()
            assert start(STREAM, *(t.data_ptr() for t in _tensors(second))) == STARTED
            assert [kernels for kernels, *_ in driver.calls] == _kernels_before(parts)
            again = [call for _, *call in driver.calls]
            driver.calls.clear()
            expected_parts = _long(way, at, second)
            expected = _kernels(expected_parts)
            assert [call for _, *call in driver.calls] == again
            assert bool(again) == way.is_copied
            for before, after, sizes, (*config, given) in zip(
                launched, expected, driver.sizes, driver.launches, strict=True
            ):
                assert given == _params(after, sizes) != _params(before, sizes), way.name
                assert config == [after.grid, after.threads, after.shared_bytes, after.cluster]
            assert driver.recorded == [(EVENT, STREAM)]


def _kernels_before(parts: list[Part]) -> list[int]:
    """How many kernels a call has launched before each function of the driver that its commands call."""
    found, kernels = [], 0
    for part in parts:
        if isinstance(part, Launched):
            kernels += 1
        else:
            found += [kernels for command in part or () for _ in range(1 + (command.do is Do.TAKE))]
    return found


def _given(product: bool, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Operands with the product in place of x and w, for a kernel that takes it."""
    if not product:
        return operands
    x, w, out, how = operands  # a bias is in the product already
    return [torch.empty(x[0].shape[0], w[0].shape[1], dtype=x[0].dtype)], (), out, how._replace(bias=None)


def _sizes(launched: Launched) -> list[int]:
    """Bytes of each parameter that are compared."""
    ends = [*launched.offsets[1:], len(launched.params)]
    if len(launched.offsets) == 1:
        return [len(launched.params)]
    return [min(end - begin, 128) for begin, end in zip(launched.offsets, ends, strict=True)]


def test_what_makes_a_launch_go_the_long_way() -> None:
    """Each word of the guard, a capture, an operand that is placed otherwise, and the driver's refusal."""
    with faked() as driver:
        words, x = Words(), torch.empty(64, dtype=torch.bfloat16)
        params = struct.pack("QQ", x.data_ptr() + 32, 5)
        places = (prepared.At(0, x.data_ptr() + 32, False),)
        start = prepare([Launched(77, 4, 128, 0, 0, params, (0, 8), places)], [x], words.guard)
        assert start is not None
        driver.sizes = [[8, 8]]

        def started(stream: int = STREAM, address: int = x.data_ptr()) -> int:
            before = len(driver.recorded)
            outcome = start(stream, address)
            assert (len(driver.recorded) > before) == (outcome == STARTED)
            return outcome

        assert started(address=4096) == STARTED
        assert driver.launches[-1] == (4, 128, 0, 0, [struct.pack("Q", 4096 + 32), struct.pack("Q", 5)])
        for word, bad, outcome in (
            (words.raised, 1, FAILED), (words.bad_input, 1 << 48, FAILED), (words.failed, 1, FAILED),
            (words.generation, 4, OTHER_MEMORY), (words.last, STREAM + 1, OTHER_STREAM),
            (words.event, 0, OTHER_STREAM),
        ):  # fmt: skip
            word.value, good = bad, word.value
            assert started() == outcome
            word.value = good
        assert started(stream=8) == OTHER_STREAM
        assert started(address=x.data_ptr() + 8) == MISPLACED
        driver.capturing = 1
        assert started() == CAPTURING
        driver.capturing, driver.error = 0, 1
        assert started() == REFUSED
        driver.error = 0
        assert started() == STARTED


def test_what_cannot_be_prepared() -> None:
    """A launch that is not known, operands of which two have one address, or one is not passed."""
    words, x = Words(), torch.empty(64)
    launched = Launched(77, 1, 32, 0, 0, bytes(16), (0,), (prepared.At(0, x.data_ptr(), False),))
    with faked():
        assert prepare([launched], [x], words.guard) is not None
        assert prepare([], [x], words.guard) is None
        for launches in ([None], [launched, None], [None, launched]):
            assert prepare(launches, [x], words.guard) is None
        assert prepare([launched], [x, x[8:]], words.guard) is None
        assert prepare([launched], [x, torch.empty(4)], words.guard) is None
        assert prepare([replace(launched, params=bytes(8192))], [x], words.guard) is None
    with patch.object(prepared, "library", lambda: None):
        assert prepare([launched], [x], words.guard) is None


def test_a_second_kernel_follows_whatever_has_happened() -> None:
    """The call has begun: peers know. What the driver refuses then is raised."""
    words, x = Words(), torch.empty(64)
    launched = Launched(77, 1, 32, 0, 0, bytes(16), (0,), (prepared.At(0, x.data_ptr(), False),))
    with faked() as driver:
        start = prepare([launched, launched], [x], words.guard)
        assert start is not None
        assert start(STREAM, x.data_ptr()) == STARTED
        assert len(driver.launches) == 2
        driver.during = lambda: setattr(words.raised, "value", 1)
        assert start(STREAM, x.data_ptr()) == STARTED
        assert start(STREAM, x.data_ptr()) == FAILED
        assert len(driver.launches) == 4
        words.raised.value = 0
        driver.during, recorded = lambda: setattr(driver, "error", 1), len(driver.recorded)
        with pytest.raises(RuntimeError, match="has begun"):
            start(STREAM, x.data_ptr())
        assert len(driver.recorded) == recorded + 1  # other streams wait for the first


def test_commands_that_the_driver_refuses() -> None:
    """Nothing has begun if it refuses the first one. Later the call cannot be repeated."""
    words, x = Words(), torch.empty(64)
    launched = Launched(77, 1, 32, 0, 0, bytes(16), (0,), (prepared.At(0, x.data_ptr(), False),))
    wait = Command(Do.AWAIT, 5, 6)
    copy = Command(Do.COPY, 5, 4096, x.data_ptr() + 32, 8)
    with faked() as driver:
        start = prepare([(wait, copy), launched], [x], words.guard)
        assert start is not None
        assert start(STREAM, 1 << 20) == STARTED
        assert driver.calls == [
            (0, "cuStreamWaitEvent", 5, 6, 0),
            (0, "cuMemcpyDtoDAsync", 4096, (1 << 20) + 32, 8, 5),
        ]
        driver.refused, before = "cuStreamWaitEvent", len(driver.recorded)
        assert start(STREAM, x.data_ptr()) == REFUSED
        assert (len(driver.launches), len(driver.recorded)) == (1, before)
        driver.refused = "cuMemcpyDtoDAsync"
        with pytest.raises(RuntimeError, match="has begun"):
            start(STREAM, x.data_ptr())
        assert (len(driver.launches), len(driver.recorded)) == (1, before + 1)
        assert prepare([(wait, copy)], [x], words.guard) is None  # no kernel
        assert prepare([(wait, copy), launched], [x, x[8:]], words.guard) is None


def test_the_launcher_goes_on_the_short_way_until_a_setting_changes() -> None:
    problem = DenseProblem(REDUCE, 8, K, N, WORLD, torch.bfloat16)
    way = next(way for name, way in ways_of(problem).items() if name.startswith("words"))
    memory, words = peer_memory(WORLD, way.need), Words()
    unchanged = Mock(return_value=True)
    workspace: Any = Mock(serial=False, device=torch.device("cpu"))
    workspace.again = SimpleNamespace(guard=words.guard, unchanged=unchanged)
    workspace.enter.return_value, workspace.enter_again.return_value = (memory, 5, False), memory
    with faked() as driver:
        made = Launcher(workspace, way, REDUCE, "site", problem, None)
        x, w, out, how = _operands(problem)
        again = partial(made.again, (*x, *w), [contiguous(8, N)])
        assert again() is None
        made.enter()
        made.launch(x, w, out, how)
        assert not made.is_short
        made.launch(x, w, out, how)
        assert made.is_short
        (found,) = again() or []
        assert (found.shape, found.stride(), found.dtype) == (out.shape, out.stride(), out.dtype)
        assert len(driver.launches) == 1
        elsewhere = Mock(get_device=lambda: 1, data_ptr=lambda: out.data_ptr())  # on another current GPU
        with patch.object(made, "_empty", lambda *sizes: elsewhere):
            assert again() is None
        assert len(driver.launches) == 1
        unchanged.return_value = False
        assert again() is None
        assert len(driver.launches) == 1


def test_what_is_compiled_ahead_is_what_a_dependent_launch_takes() -> None:
    """Or the first launch would compile while peers wait for it."""
    given: list[dict[str, Any]] = []

    class Kernel:
        params: tuple[Any, ...] = ()

        def warmup(self, *args: Any, grid: Any, **settings: Any) -> None:
            given.append(settings)

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **settings: given.append(settings)

    with faked(), dependent_launches():
        for compile_only in (True, False):
            launch(Kernel(), 1, compile_only, num_warps=4)
    assert given == [{"num_warps": 4, "launch_pdl": True}] * 2

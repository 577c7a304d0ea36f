"""Predictions of sites on GPUs: by the model that chooses ways, for all that it knows."""

import dataclasses
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

pytest.importorskip("triton")

from autofuse.lowering.gpu import support
from autofuse.lowering.gpu.choice.choose import choose
from autofuse.lowering.gpu.choice.correction import Predictor
from autofuse.lowering.gpu.dense.factors import BIASED, MADE, MULTIPLIED, SCALED
from autofuse.lowering.gpu.dense.ways import DenseProblem
from autofuse.lowering.ops.matmul_all_reduce import MatmulAllReduce
from autofuse.passes import Settings, fuse
from autofuse.passes.choice import ways
from autofuse.passes.choice.choose import _predict_ways, on_gpu
from autofuse.passes.choice.cost_model import Task
from autofuse.passes.choice.crossover import Known
from autofuse.passes.choice.ways import predictor_on, problem_of, product_of, times
from autofuse.passes.report import Site
from tests.kernels.test_products import CASES

from .harness import fake_group
from .test_on_gpus import moved, reduced

M, K, N, WORLD = 512, 2048, 8192, 4
REDUCE = Task("matmul_all_reduce", WORLD, "bfloat16", "direct", M * N * 2, ((M, K, N),))
ROWS = sympy.Symbol("s0", integer=True, positive=True)


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    found = predictor_on(torch.device("cuda"))
    assert found is not None
    return found


def test_a_site_takes_as_long_as_the_way_that_is_chosen(predictor: Predictor) -> None:
    found = times(REDUCE, predictor)
    assert found is not None
    fused, ours, apart = found
    problem = DenseProblem("matmul_all_reduce", M, K, N, WORLD, torch.bfloat16)
    assert fused == choose(problem, predictor).us
    assert fused <= ours < apart
    choice = _predict_ways(REDUCE, predictor, (), True)
    assert choice is not None
    shown = choice.prediction
    assert (choice.fuse, choice.apart_us, shown.wins, shown.table) == (
        True,
        round(apart, 1),
        "always",
        "h200",
    )
    assert (shown.fused_us, shown.unfused_us) == (round(fused, 1), round(apart, 1))
    assert shown.fused == str(shown.fused_us)


@pytest.mark.parametrize(
    "task",
    [
        dataclasses.replace(REDUCE, op="matmul_reduce_scatter"),
        dataclasses.replace(REDUCE, op="all_gather_matmul", matmuls=((M, 8192, 2048),)),
        dataclasses.replace(REDUCE, op="matmul_all_gather"),
        Task("expert_matmul_all_to_all", WORLD, "bfloat16", "direct", 1 << 20, ((4096, 2048, 4096),), 8),
        Task("all_to_all_expert_matmul", WORLD, "bfloat16", "direct", 1 << 20, ((4096, 2048, 4096),) * 2, 8),
    ],
    ids=lambda task: task.op,
)
def test_every_op_of_matmuls_is_known(task: Task, predictor: Predictor) -> None:
    found = times(task, predictor)
    assert found is not None
    fused, ours, apart = found
    assert 0 < fused <= min(ours, apart) * 1.03
    (m, k, n), *_ = task.matmuls
    longer = times(dataclasses.replace(task, matmuls=((4 * m, k, n), *task.matmuls[1:])), predictor)
    assert longer is not None
    assert longer[2] > apart


@pytest.mark.parametrize(("rows", "together"), [(64, 1), (M, 4)])
def test_weights_of_a_gather_share_its_kernel(rows: int, together: int, predictor: Predictor) -> None:
    """Those of many rows, up to four. All others are multiplied afterwards."""
    one = dataclasses.replace(REDUCE, op="all_gather_matmul", matmuls=((rows, 8192, 2048),))
    found = [
        times(dataclasses.replace(one, matmuls=one.matmuls * count), predictor) for count in (1, 2, 4, 5)
    ]
    (a, b, c, d) = (each for each in found if each is not None)
    assert a[0] < b[0] < c[0] < d[0]
    assert d[0] - c[0] == pytest.approx(d[2] - c[2])
    apart = pytest.approx(b[2] - a[2])
    assert b[0] - a[0] == apart if together == 1 else b[0] - a[0] < apart.expected


@pytest.mark.parametrize("op", ["matmul_all_reduce", "matmul_reduce_scatter"])
def test_a_sum_of_matmuls_takes_kernels_as_long_as_one_of_their_length(op: str, predictor: Predictor) -> None:
    """A sum replaces several matmuls of cuBLAS, which take longer than one matmul of their total length."""
    formulas = Predictor(predictor.model, ())
    for rows, apart in ((M, 0.2), (8 * M, 0.1)):  # measured points of one matmul count less
        one = dataclasses.replace(REDUCE, op=op, matmuls=((rows, 4 * K, N),))
        some = dataclasses.replace(one, matmuls=((rows, 3 * K, N), (rows, K, N)))
        a, b = (times(task, predictor) for task in (one, some))
        assert a is not None
        assert b is not None
        assert b[1] == pytest.approx(a[1], rel=apart)
        a, b = (times(task, formulas) for task in (one, some))
        assert a is not None
        assert b is not None
        assert b[2] > a[2]


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "float32"},
        {"matmuls": ()},
        {"matmuls": REDUCE.matmuls * 2, "op": "matmul_all_gather"},
        {"matmuls": ((M, K, 0),)},
        {"matmuls": ((M, 0, N),)},
        {"matmuls": ((0, K, N),)},
        {"op": "embedding_bag_all_to_all", "matmuls": (), "pooled": 1 << 20},
        {"op": "matmul_reduce_scatter", "matmuls": ((M + 1, K, N),)},
    ],
)
def test_what_has_no_ways_is_left_to_the_cost_model(other: dict[str, object], predictor: Predictor) -> None:
    task = dataclasses.replace(REDUCE, **other)  # type: ignore[arg-type]
    assert times(task, predictor) is None
    assert _predict_ways(task, predictor, (), True) is None


@pytest.mark.parametrize("matmuls", [((M, K + 1, N),), ((M, K, N), (M, K + 4, N), (M, K - 4, N))])
def test_behind_products_that_no_kernel_computes_sums_have_ways(
    matmuls: tuple[tuple[int, int, int], ...], predictor: Predictor
) -> None:
    found = times(dataclasses.replace(REDUCE, matmuls=matmuls), predictor)
    assert found is not None
    best, ours, apart = found
    assert best <= min(ours, apart)


@pytest.mark.parametrize(
    ("us", "fused"),
    [
        ((24.0, 40.0, 24.0), False),
        ((24.0, 25.0, 24.0), True),  # a measurement may turn it
        ((20.0, 40.0, 24.0), True),  # another way of torch is the fastest, which only the fused op takes
        ((18.0, 18.0, 24.0), True),
    ],
)
def test_a_static_site_is_kept_where_what_it_replaces_is_the_fastest(
    us: tuple[float, float, float], fused: bool, predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """us: of the fused op, of our fastest kernel, and of what it replaces."""
    monkeypatch.setattr(ways, "times", lambda task, predictor: us)
    for known in ((), ((ROWS, Known(1, 8192, 512)),)):
        found = _predict_ways.__wrapped__(REDUCE, predictor, known, False)
        assert found is not None
        choice = on_gpu(found)
        assert choice.fuse == (fused or bool(known))
        assert bool(choice.why) != choice.fuse
        if choice.why:
            assert "24.0 us; our fastest kernel 40.0 us" in choice.why


def test_dynamic_sizes_are_fused_whatever_their_hints(predictor: Predictor) -> None:
    task = dataclasses.replace(REDUCE, sent=ROWS * N * 2, matmuls=((ROWS, K, N),))
    for text in (False, True):
        choices = [_predict_ways(task, predictor, ((ROWS, Known(1, 8192, hint)),), text) for hint in (8, 512)]
        for choice in choices:
            assert choice is not None
            assert (choice.fuse, choice.apart_us, choice.prediction.fused) == (True, None, "")
        assert choices[0].prediction.wins == choices[1].prediction.wins  # type: ignore[union-attr]


@pytest.mark.parametrize("op", ["matmul_all_reduce", "matmul_reduce_scatter"])
def test_a_product_that_torch_computes_is_priced_by_its_ways(op: str, predictor: Predictor) -> None:
    plain = dataclasses.replace(REDUCE, op=op)
    made = dataclasses.replace(plain, product=MADE)
    problem = DenseProblem(op, M, K, N, WORLD, torch.bfloat16, product=MADE)
    assert problem_of(made, problem.programs) == problem
    found, of_plain = times(made, predictor), times(plain, predictor)
    assert found is not None
    assert of_plain is not None
    assert found[0] == choose(problem, predictor).us
    assert found[0] > of_plain[0]
    terms = dataclasses.replace(made, matmuls=((M, K, N),) * 5)
    assert problem_of(terms, problem.programs) == dataclasses.replace(problem, k=5 * K)
    wide = dataclasses.replace(made, dtype="float32")
    assert problem_of(wide, problem.programs) == dataclasses.replace(problem, dtype=torch.float32)
    assert problem_of(dataclasses.replace(made, dtype="float64"), problem.programs) is None


@pytest.mark.parametrize("case", CASES)
def test_passes_know_the_kinds_of_products_that_calls_have(case: str) -> None:
    x, w, operands, text, keep, kind = CASES[case]
    assert (
        product_of(MatmulAllReduce(x, w, operands, text, "sum", keep, [], "", "", "g", "direct", "s")) == kind
    )


@pytest.mark.parametrize("text", ["grouped %0; sum 2", "bags sum 0 -1"])
def test_sums_of_rows_have_no_kind(text: str) -> None:
    t = [torch.empty(2, 2)]
    end: Any = ("sum", True, [], "", "", "g", "direct", "s")
    assert product_of(MatmulAllReduce(t, t, t, text, *end)) == MULTIPLIED
    assert product_of(None) == MULTIPLIED


def test_the_kind_of_a_product_guards_no_symbol() -> None:
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        rows = env.create_unbacked_symint()
        x, w = torch.empty(rows, 16, dtype=torch.bfloat16), torch.empty(16, 8, dtype=torch.bfloat16)
        end: Any = ("addmm %0", "sum", False, [], "", "", "g", "direct", "s")
        biases = [torch.empty(shape, dtype=torch.bfloat16) for shape in ((8,), (1, 8), (rows, 8), (rows, 1))]
        found = [product_of(MatmulAllReduce([x], [w], [bias], *end)) for bias in biases]
    assert found == [BIASED, BIASED, MADE, MADE]
    assert not env.guards


def _site(m: int, k: int, n: int, bias: tuple[int, ...], how: str) -> Site:
    with fake_group(WORLD), FakeTensorMode(), patch.object(support, "why_not", lambda device: None):
        x, w, b = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((m, k), (n, k), bias))
        graph = moved(make_fx(partial(reduced, how=how))(x, w, b).graph)
        (site,) = fuse(graph, Settings(policy="auto"), "inference", "0").sites
    return site


@pytest.mark.parametrize(
    ("how", "bias", "product", "dtype"),
    [
        ("everywhere", (N,), BIASED, torch.bfloat16),
        ("everywhere", (M, N), MADE, torch.bfloat16),
        ("scaled", (N,), SCALED, torch.bfloat16),
        ("cast", (N,), MADE, torch.float32),
        ("read elsewhere", (N,), MADE, torch.bfloat16),
    ],
)
def test_the_time_of_a_site_is_that_of_its_product(
    how: str, bias: tuple[int, ...], product: str, dtype: torch.dtype, predictor: Predictor
) -> None:
    site = _site(M, K, N, bias, how)
    problem = DenseProblem("matmul_all_reduce", M, K, N, WORLD, dtype, product=product)
    assert site.fused
    assert site.prediction is not None
    assert site.prediction.fused_us == round(choose(problem, predictor).us, 1)
    assert site.prediction.task.endswith(f"product={product}")


def test_a_product_of_one_rank_decides_nothing(predictor: Predictor) -> None:
    """Ranks decide alike though one of them adds a bias, of which fewer ways are possible."""
    m, k, n = 32768, 1024, 16384
    task = Task("matmul_reduce_scatter", WORLD, "bfloat16", "direct", 2 * m * n, ((m, k, n),))
    kept = [
        _predict_ways(dataclasses.replace(task, product=each), predictor, (), False)
        for each in ("mm", BIASED)
    ]
    assert [choice is not None and choice.fuse for choice in kept] == [True, False]
    site = _site(m, k, n, (n,), "scattered")
    assert site.fused
    assert site.prediction is not None
    assert site.prediction.fused_us == site.prediction.unfused_us

"""Ranks decide alike: what may differ between them changes nothing, and what may not is said by name.

The list of what decisions depend on is in docs/architecture.md.
"""

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

import autofuse
from autofuse import config, ops
from autofuse.lowering.cpu import recipes, reduce_executor, rendezvous
from autofuse.native_kernels import cpu
from autofuse.passes.graph.anchors import Anchor
from tests.passes import experts
from tests.passes.harness import fake_group, passes_only
from tests.ranks import RankPool, fresh_group
from tests.robustness.seven import integers

Ranks = Callable[[int], RankPool]


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def _compare(fn: Callable[..., Tensor], *args: Any, policy: str = "always") -> list[str]:
    """Patterns that were fused, after a comparison with eager."""
    torch._dynamo.reset()
    with autofuse.debug() as report, torch.no_grad():
        actual = torch.compile(fn, backend=passes_only(policy))(*args)
    assert torch.equal(actual, fn(*args))
    return [str(site.pattern) for site in report.fused]


def _reduce(x: Tensor, w: Tensor, group: Any) -> Tensor:
    return funcol.all_reduce(x @ w, "sum", group).relu()


def _operands(rank: int) -> tuple[Tensor, Tensor]:
    return integers(rank, 4, 6), integers(7 + rank, 6, 8)


# --- What may differ ----------------------------------------------------------------------------------


def _bias_on_one_rank(rank: int, world: int) -> list[str]:
    """The usual way to add a bias once."""
    group, (x, w), bias = fresh_group(), _operands(rank), integers(9, 8)
    return _compare(lambda: funcol.all_reduce(F.linear(x, w.t(), bias if rank == 0 else None), "sum", group))


def _uneven_shards(rank: int, world: int) -> list[str]:
    """The contracted dim and the columns of a weight are a rank's own affair."""
    group, k = fresh_group(), 5 + 3 * rank
    x, v, w = integers(rank, 4, k), integers(7 + rank, k, 8), integers(9 + rank, 8, 2 + rank)

    def fn() -> Tensor:
        return funcol.all_gather_tensor(funcol.all_reduce(x @ v, "sum", group), 0, group) @ w

    return _compare(fn)


def _broken_on_one_rank(rank: int, world: int) -> list[str]:
    """One rank prints, which cuts its graph in two: its collectives are numbered from 0 again."""
    group, (x, w) = fresh_group(), _operands(rank)

    def fn() -> Tensor:
        y = funcol.all_reduce(x @ w, "sum", group)
        if rank == 0:
            torch._dynamo.graph_break()
        return funcol.all_reduce(y.t() @ x, "sum", group)

    return _compare(fn)


def _broken_without_stack_traces(rank: int, world: int) -> list[str]:
    with patch.object(Anchor, "source", None):
        return _broken_on_one_rank(rank, world)


def _read_on_one_rank(rank: int, world: int) -> list[str]:
    """The other ranks do not read the sum, but have to bring their part."""
    group, (x, w) = fresh_group(), _operands(rank)

    def fn() -> Tensor:
        y = funcol.all_reduce(x @ w, "sum", group)
        return y.relu() if rank == 0 else x + 1

    return _compare(fn)


def _gathered_for_one_rank(rank: int, world: int) -> list[str]:
    group, (x, w) = fresh_group(), _operands(rank)

    def fn() -> Tensor:
        y = funcol.all_gather_tensor(x @ w, 0, group)
        return y.relu() if rank == 0 else x + 1

    return _compare(fn)


def _biased_sum(rank: int, world: int) -> list[str]:
    return _sum_of_two(rank, biased=rank == 0, read=False)


def _sum_of_a_product_read_on_one_rank(rank: int, world: int) -> list[str]:
    return _sum_of_two(rank, biased=False, read=rank == 0)


def _biased_sum_read_inside_on_one_rank(rank: int, world: int) -> list[str]:
    return _sum_of_two(rank, biased=True, read=rank == 0)


def _sum_of_two(rank: int, biased: bool, read: bool) -> list[str]:
    """Reductions that become one on all ranks."""
    group, (x, w), bias = fresh_group(), _operands(rank), integers(9, 4, 8)

    def fn() -> Tensor:
        product = x @ w
        mine = product + bias if biased else product
        total = funcol.all_reduce(mine, "sum", group) + funcol.all_reduce((x + 1) @ w, "sum", group)
        return total + product.sin() if read else total

    return _compare(fn)


def _read_by_another_group(rank: int, world: int, factor: float | None = None) -> list[str]:
    """One rank hands the product to an earlier collective, of a group that the others are not in."""
    group, (x, w), alone = fresh_group(), _operands(rank), dist.new_group([0])

    def fn() -> Tensor:
        product, more = x @ w, torch.zeros(())
        if rank == 0:
            more = funcol.all_reduce(product.sin(), "sum", alone).sum()
        mine = product if factor is None else product * factor
        return funcol.all_reduce(mine, "sum", group) + more

    return _compare(fn)


def _read_inside_by_another_group(rank: int, world: int) -> list[str]:
    return _read_by_another_group(rank, world, factor=2.0)


def _read_inside_on_one_rank(rank: int, world: int) -> list[str]:
    group, (x, w) = fresh_group(), _operands(rank)

    def fn() -> Tensor:
        product = x @ w
        y = funcol.all_reduce(product * 2, "sum", group)
        return y + product.sin() if rank == 0 else y

    return _compare(fn)


def _contracted_sizes(rank: int, world: int, *sizes: int) -> list[str]:
    """Inductor replaces small matmuls by products and sums, before our passes if nothing keeps it from it."""
    group, k = fresh_group(), sizes[rank]
    x, w, bias = integers(rank, 2, k), integers(7 + rank, k, 4), integers(9, 4)

    def fn() -> tuple[Tensor, ...]:
        one_row = F.linear(x[:1], w.t(), bias)
        return funcol.all_reduce(x @ w, "sum", group), funcol.all_reduce(one_row, "sum", group)

    return _compare(lambda: torch.cat(fn()))


def _no_columns(rank: int, world: int) -> str:
    """Inductor computes no tensor without elements, and erases what nobody reads. The op has to stay."""
    group, columns = fresh_group(), 3 * rank
    x, w = integers(rank, 4, 6), integers(7, 6, columns)

    def fn() -> tuple[Tensor, Tensor]:
        gathered = funcol.all_gather_tensor(x, 0, group) @ w
        return gathered.relu(), funcol.all_reduce(x @ x.t(), "sum", group)

    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(fn, backend="autofuse", options={"policy": "always"})()
    assert all(map(torch.equal, found, fn()))
    return ""


def _from_another_folder(rank: int, world: int, directory: str) -> list[str]:
    """Every rank has a checkout of its own, and runs from there."""
    folder = Path(directory, f"checkout{rank}")
    folder.mkdir()
    source = Path(__file__).read_text()
    start = source.index("def _reduce")
    head = "from torch.distributed import _functional_collectives as funcol\nfrom typing import Any\n"
    text = head + "from torch import Tensor\n" + source[start : source.index("\n\n", start)]
    (folder / "model.py").write_text(text)
    spec = importlib.util.spec_from_file_location("model", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = os.getcwd()
    os.chdir(folder)
    try:
        return _compare(module._reduce, *_operands(rank), fresh_group())
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    ("fn", "fused"),
    [
        (_bias_on_one_rank, ["matmul_all_reduce"]),
        (_uneven_shards, ["matmul_all_reduce", "all_gather_matmul"]),
        (_broken_on_one_rank, ["matmul_all_reduce"] * 2),
        (_broken_without_stack_traces, ["matmul_all_reduce"] * 2),
        (_read_on_one_rank, ["matmul_all_reduce"]),
        (_gathered_for_one_rank, ["matmul_all_gather"]),
        (_biased_sum, ["matmul_all_reduce"] * 2),
        (_sum_of_a_product_read_on_one_rank, ["matmul_all_reduce"] * 2),
        (_biased_sum_read_inside_on_one_rank, ["matmul_all_reduce"] * 2),
        (_read_by_another_group, ["matmul_all_reduce"]),
        (_read_inside_by_another_group, ["matmul_all_reduce"]),
        (_read_inside_on_one_rank, ["matmul_all_reduce"]),
    ],
)
def test_programs_that_differ_by_rank(ranks: Ranks, fn: Callable[..., Any], fused: list[str]) -> None:
    assert ranks(2).run(fn) == [fused] * 2


@pytest.mark.parametrize("sizes", [(5, 1), (17, 16), (5, 0)], ids=str)
def test_contracted_sizes(ranks: Ranks, sizes: tuple[int, int]) -> None:
    assert ranks(2).run(_contracted_sizes, *sizes) == [["matmul_all_reduce"] * 2] * 2


def test_a_rank_without_columns(ranks: Ranks) -> None:
    ranks(2).run(_no_columns)


def _changing_numbers(rank: int, world: int) -> list[list[str]]:
    """Between calls the batch and a factor change on one rank. Its next graph has symbols for them, while the
    graphs of its peers keep constants."""
    group = fresh_group()
    torch._dynamo.reset()

    def fn(x: Tensor, dy: Tensor, factor: int, scale: float) -> Tensor:
        return funcol.all_reduce((x.t() @ dy * factor - scale) / x.shape[0], "sum", group)

    compiled = torch.compile(fn, backend=passes_only())
    with autofuse.debug() as report, torch.no_grad():
        for batch, factor, scale in ((4, 2, 0.5), (4 * (rank + 1), 2 + rank, 0.5 + rank), (4, 2, 0.5)):
            args = integers(rank, batch, 3), integers(7 + rank, batch, 5), factor, scale
            assert torch.equal(compiled(*args), fn(*args))
    return [[str(s.pattern) for s in graph.sites if s.fused] for graph in report.graphs]


def test_numbers_that_change_on_one_rank(ranks: Ranks) -> None:
    first, second = ranks(2).run(_changing_numbers)
    assert first == [["matmul_all_reduce"]]
    assert second == [["matmul_all_reduce"]] * 2


def _changing_batch(rank: int, world: int) -> list[list[str]]:
    """The batch size changes on one rank only, so only that rank compiles a graph with a symbol for it. Two
    ops could take the gradient, and all ranks must choose the same one."""
    group, p = fresh_group(), torch.zeros(30, 30)
    torch._dynamo.reset()

    def step(x: Tensor, dy: Tensor, p: Tensor) -> None:
        p.sub_(0.5 * funcol.all_reduce(x.t() @ dy, "sum", group))

    compiled = torch.compile(step, backend=passes_only())
    with autofuse.debug() as report, torch.no_grad():
        for batch in (4, 4 + 3 * rank):
            args, expected = (integers(rank, batch, 30), integers(7 + rank, batch, 30)), p.clone()
            step(*args, expected)
            compiled(*args, p)
            assert torch.equal(p, expected)
    return [[str(s.pattern) for s in graph.sites if s.fused] for graph in report.graphs]


def test_a_batch_that_changes_on_one_rank(ranks: Ranks) -> None:
    first, second = ranks(2).run(_changing_batch)
    assert len(first) == 1
    assert second == first * 2


def test_sources_in_another_folder(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(_from_another_folder, str(tmp_path)) == [["matmul_all_reduce"]] * 2


def _own_token_counts(rank: int, world: int, policy: str) -> list[list[str]]:
    """Tokens differ by rank, so that ranks trace other sizes: of a single token, static ones."""
    torch._dynamo.reset()
    torch.manual_seed(rank)
    model = experts.Dropless()
    compiled = torch.compile(model, backend=passes_only(policy), dynamic=True)
    with autofuse.debug() as report, torch._dynamo.config.patch(capture_scalar_outputs=True):
        for tokens in ((1, 24), (24, 1), (7, 30)):
            x = torch.randn(tokens[rank], experts.D, dtype=torch.bfloat16)
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), model(x), atol=0.02, rtol=0.02)
    return [[str(s.pattern) for s in graph.sites if s.fused] for graph in report.graphs]


@pytest.mark.parametrize("policy", [pytest.param("always", marks=pytest.mark.full), "auto"])
def test_ranks_with_their_own_token_counts(ranks: Ranks, policy: str) -> None:
    for graphs in ranks(2).run(_own_token_counts, policy, timeout=120):
        assert graphs
        assert all(fused == [experts.DISPATCH, experts.COMBINE] for fused in graphs)


class Sliced(torch.nn.Module):
    """A rank slices rows of a tensor of any length, as DTensor does: the size of the last slice is another
    expression than those of the others."""

    def __init__(self, rank: int, world: int, group: Any) -> None:
        super().__init__()
        self.rank, self.world, self.group = rank, world, group
        self.w, self.v = integers(1, 4, 8), integers(2, 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[1]
        each = (rows + self.world - 1) // self.world
        first, is_last = self.rank * each, self.rank == self.world - 1
        own = x.narrow(1, first, rows - first if is_last else each)
        hidden = (funcol.all_gather_tensor(own, 1, self.group) @ self.w).relu()
        return own + funcol.reduce_scatter_tensor(hidden @ self.v, "sum", 1, self.group)


def _slices(rank: int, world: int, policy: str) -> list[list[str]]:
    torch._dynamo.reset()
    model = Sliced(rank, world, fresh_group())
    compiled = torch.compile(model, backend=passes_only(policy), dynamic=True)
    with autofuse.debug() as report, torch.no_grad():
        for rows in (2 * world, 5 * world):
            x = integers(3, 3 * rows, 4).view(3, rows, 4)
            assert torch.equal(compiled(x), model(x))
    return [[str(s.pattern) for s in graph.sites if s.fused] for graph in report.graphs]


@pytest.mark.parametrize("world", [2, 4])
def test_slices_of_any_length(ranks: Ranks, world: int) -> None:
    both = ["all_gather_matmul", "matmul_reduce_scatter"]
    for graphs in ranks(world).run(_slices, "always"):
        assert graphs
        assert all(fused == both for fused in graphs)
    first, *others = ranks(world).run(_slices, "auto")
    assert all(fused == first for fused in others)


def _exchange(x: Tensor, output: list[int], given: list[int], group: str) -> Tensor:
    return funcol.wait_tensor(funcol.all_to_all_single(x, output, given, group))


def _no_rows(rank: int, world: int, generated: bool) -> list[list[str]]:
    """The expert of one rank gets no rows, the splits are constants: dispatch, expert, combine."""
    group = fresh_group()
    torch._dynamo.reset()
    w = integers(7 + rank, 4, 4)

    def fn(x: Tensor, there: list[int], back: list[int]) -> Tensor:
        rows = _exchange(x, there, back, group) @ w
        return _exchange(rows.relu() @ w, back, there, group)

    sent = [[[0, 3], [0, 2]], [[2, 0], [1, 0]], [[0, 0], [0, 0]]]  # by call, rank and destination
    compiled = torch.compile(fn, backend="autofuse" if generated else passes_only(), dynamic=False)
    with autofuse.debug() as report, torch.no_grad(), config.patch(policy="always"):
        for each in sent:
            args = integers(rank, sum(each[rank]), 4), [row[rank] for row in each], each[rank]
            assert torch.equal(compiled(*args), fn(*args))
    return [[str(s.pattern) for s in graph.sites if s.fused] for graph in report.graphs]


@pytest.mark.parametrize("generated", [False, True])
def test_experts_without_rows(ranks: Ranks, generated: bool) -> None:
    for graphs in ranks(2).run(_no_rows, generated):
        assert graphs == [[experts.DISPATCH, experts.COMBINE]] * 3


def _dispatch_and_choose(x: Tensor, places: Tensor, w: Tensor, v: Tensor, splits: list[int]) -> Tensor:
    rows = funcol.all_to_all_single_autograd(x, splits, [2, 2], dist.group.WORLD)
    return F.silu(rows[places] @ w) @ v


@pytest.mark.parametrize("rows", [3, 0])
def test_the_backward_of_experts_without_rows(rows: int) -> None:
    """The forward saves for it the zeros that gradients of rows are put into: without elements, they are
    free."""
    weights = (torch.randn(shape, requires_grad=True) for shape in ((4, 6), (6, 5), (5, 5)))
    with fake_group(2), config.patch(policy="always"):
        x, w, v = weights
        report = autofuse.explain(_dispatch_and_choose, backward=True)(x, torch.arange(rows), w, v, [rows, 0])
    assert [site.pattern for site in report.fused] == [experts.COMBINE]


def _rows_back(x: Tensor, places: Tensor, w: Tensor, splits: list[int], how: str) -> Tensor:
    rows = funcol.all_to_all_single(x, splits, [2, 2], dist.group.WORLD)
    rows = (rows @ w).relu() @ w
    if how == "chosen":
        back = rows[places]
    else:
        back = torch.ones_like(rows)
        back[places] = rows
    return funcol.wait_tensor(funcol.all_to_all_single(back, [2, 2], splits, dist.group.WORLD))


@pytest.mark.parametrize("how", ["chosen", "put into ones"])
def test_a_rank_without_rows_keeps_what_its_peers_keep(how: str) -> None:
    """An index without entries could be a permutation, and ones without elements could be zeros."""
    seen = []
    for rows in (3, 0):
        with fake_group(2), config.patch(policy="always"), torch.no_grad():
            args = torch.randn(4, 4), torch.arange(rows), torch.randn(4, 4), [rows, 0], how
            seen.append([(site.fused, site.reason) for site in autofuse.explain(_rows_back)(*args).sites])
    assert seen[0] == seen[1]
    assert [fused for fused, _ in seen[0]] == [True, False]


def _loop(x: Tensor, w: Tensor, splits: list[int], rows: list[int]) -> Tensor:
    received = funcol.all_to_all_single_autograd(x, splits, [2, 2], dist.group.WORLD)
    parts = zip(received.split(rows), w, strict=True)
    done = torch.cat([(part @ each).relu() @ each for part, each in parts])
    return funcol.all_to_all_single_autograd(done, [2, 2], splits, dist.group.WORLD)


@pytest.mark.parametrize("grad", [False, True])
def test_a_loop_over_experts_with_equally_many_rows(grad: bool) -> None:
    """Its peers have experts with unequal numbers of rows, which no fused op takes, or one with all rows."""
    seen = []
    for rows in ([1, 3], [2, 2], [1, 1], [4, 0], [0, 4], [1, 0]):
        x, w = torch.randn(4, 4, requires_grad=grad), torch.randn(2, 4, 4, requires_grad=grad)
        with fake_group(2), config.patch(policy="always"), torch.set_grad_enabled(grad):
            report = autofuse.explain(_loop, backward=grad)(x, w, [sum(rows) - 1, 1], rows)
        seen.append([site.fused for site in report.sites])
    assert seen == [[False] * (4 if grad else 2)] * 6


def _wide_experts(x: Tensor, counts: Tensor, w: Tensor, splits: list[int]) -> Tensor:
    rows = funcol.all_to_all_single_autograd(x.float(), splits, [2, 2], dist.group.WORLD)
    rows, _, sizes = experts.expert_major(rows, counts, dist.get_world_size())
    return torch._grouped_mm(rows.bfloat16(), w, offs=sizes.cumsum(0).to(torch.int32))


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("rows", [3, 0])
def test_the_wire_of_experts_whose_rows_are_constants(rows: int, changes: bool) -> None:
    """Gradients travel in bfloat16, since the places of rows are known to be a permutation: of a constant
    number of rows, of one that changes, and of none."""
    x, w = torch.randn(4, 16, dtype=torch.bfloat16), torch.randn(2, 16, 8, dtype=torch.bfloat16)
    counts = torch.tensor([rows, 0, 0, 0])
    with fake_group(2), config.patch(policy="always"):
        given = x.requires_grad_(), counts, w.requires_grad_(), [rows, 0]
        with torch._dynamo.config.patch(assume_static_by_default=not changes):
            report = autofuse.explain(_wide_experts, backward=True)(*given)
    (site,) = (site for site in report.sites if site.graph.startswith("backward"))
    assert site.pattern == experts.COMBINE
    assert "getitem: bf16[" in str(report.graphs[-1].after)


# --- One rank that never shares memory: all run unfused -----------------------------------------------


def _without_kernels(rank: int, world: int, compiled: bool) -> list[str]:
    group, (x, w) = fresh_group(), _operands(rank)
    lame = world - 1
    library = (None, "install a C++ compiler") if rank == lame else (cpu._library, "")
    with patch.multiple(cpu, _library=library[0], _why_not=library[1]):
        if compiled:
            return _compare(_reduce, x, w, group)
        y = ops.matmul_all_reduce(x, w, group=group).relu()
        assert torch.equal(y, _reduce(x, w, group))
    return []


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_rank_without_kernels(ranks: Ranks, compiled: bool) -> None:
    *others, lame = ranks(3).run(_without_kernels, compiled, timeout=30)
    assert lame == []
    assert others == [["matmul_all_reduce"] * compiled] * 2  # fused where compiled, unfused where called


def _other_environment(rank: int, world: int) -> list[str]:
    changed = {"LOCAL_WORLD_SIZE": "1"} if rank == 0 else {}
    with patch.dict(os.environ, changed):
        return _compare(_reduce, *_operands(rank), fresh_group())


def test_a_launcher_that_tells_one_rank_alone(ranks: Ranks) -> None:
    assert ranks(2).run(_other_environment, timeout=30) == [[], ["matmul_all_reduce"]]


# --- What may not differ ------------------------------------------------------------------------------


def _keeps(rank: int, world: int, met: bool) -> str:
    """The last rank decides to keep the site (only asks: it would wait in the plain collective)."""
    group, (x, w) = fresh_group(), _operands(rank)
    if met:
        ops.matmul_all_reduce(x, w, group=group)
    if rank == world - 1:
        with config.patch(policy="never"):
            assert autofuse.explain(_reduce)(x, w, group).kept
    dist.barrier()
    if rank == world - 1:
        return ""
    torch._dynamo.reset()
    with config.patch(timeout_s=1.0):
        return _error(lambda: torch.compile(_reduce, backend=passes_only())(x, w, group))


@pytest.mark.parametrize("met", [False, True], ids=["first call", "later call"])
def test_a_rank_that_kept_what_others_fused(ranks: Ranks, met: bool) -> None:
    *others, _ = ranks(3).run(_keeps, met)
    for text in others:
        assert "waited 1 s for rank" in text, text
        assert re.search(r"rank 2 kept all_reduce at test_alike.py:\d+ \(policy_never\)", text), text
        if met:
            assert "latest call on this group is epoch 2, matmul_all_reduce at eager (sum" in text, text


def _merges_alone(rank: int, world: int) -> str:
    """Reductions of one line, of equal shapes: rank 0 reads one of the sums, which the other rank merges."""
    group, (x, w) = fresh_group(), _operands(rank)

    def fn() -> tuple[Tensor, ...]:
        first, second = (funcol.all_reduce(each @ w, "sum", group) for each in (x, x + 1))
        return (first + second, first.sin()) if rank == 0 else (first + second,)

    torch._dynamo.reset()
    with torch.no_grad():
        return _error(torch.compile(fn, backend=passes_only()))


def test_a_rank_that_merged_what_another_reads(ranks: Ranks) -> None:
    """An error, and no wrong sum: the first op of rank 0 reduces a part of what the other one does."""
    for text in ranks(2).run(_merges_alone):
        assert "the ranks disagree" in text
        assert re.search(r"(test_alike\.py:\d+)\+\S*\1", text), text


def _other_version(rank: int, world: int) -> str:
    digest = f"{rank:016}"
    with patch.object(rendezvous, "sources_digest", lambda: digest):
        return _error(lambda: ops.matmul_all_reduce(*_operands(rank), group=fresh_group()))


def test_other_versions_of_autofuse(ranks: Ranks) -> None:
    for text in ranks(3).run(_other_version):
        assert "different versions of autofuse" in text
        assert f"{0:016} on rank 0, {1:016} on rank 1" in text


def _other_plan(rank: int, world: int, what: str) -> str:
    """The last rank has another order, or other constants, by which its plan is made."""
    group, odd = fresh_group(), rank == world - 1
    order = "ring" if odd and what == "order" else "direct"
    most = 0 if odd and what == "constants" else reduce_executor.ONE_SHOT_BYTES
    recipes.recipe_of.cache_clear()
    with patch.object(reduce_executor, "ONE_SHOT_BYTES", most), config.patch(order=order):
        text = _error(lambda: ops.matmul_all_reduce(integers(rank, 4, 6), integers(7, 6, 8), group=group))
    recipes.recipe_of.cache_clear()
    return text


@pytest.mark.parametrize(
    ("what", "common", "odd"),
    [
        ("order", "direct in one shot of 3, chunks 1*4x8", "ring of 3, chunks 1*4x2 2*4x3"),
        ("constants", "direct in one shot of 3, chunks 1*4x8", "direct of 3, chunks 1*4x2 2*4x3"),
    ],
)
def test_other_plans(ranks: Ranks, what: str, common: str, odd: str) -> None:
    for text in ranks(3).run(_other_plan, what):
        assert "the ranks disagree" in text, text
        assert common in text, text
        assert odd in text, text
        assert "rank 2 runs matmul_all_reduce" in text, text

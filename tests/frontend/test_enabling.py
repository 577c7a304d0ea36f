"""`autofuse.enable`: stock compilations go the backend's way. Ranks: tests/robustness/test_unchanged.py."""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch.distributed import _functional_collectives as funcol
from torch.nn.attention.flex_attention import flex_attention
from torch.torch_version import TorchVersion

import autofuse
from autofuse.backend import CustomPass, fusion_pass
from autofuse.inspection import explaining
from autofuse.options import settings
from tests.frontend.entry_point import run_with_entry_point
from tests.frontend.models import both_ways, one_way, operands


@pytest.fixture(autouse=True)
def _disabled() -> Iterator[None]:
    yield
    autofuse.disable()


class Counting(CustomGraphPass):
    def __init__(self, uuid: str = "counting") -> None:
        self.graphs, self._uuid = 0, uuid

    def __call__(self, graph: fx.Graph) -> None:
        self.graphs += 1

    def uuid(self) -> str:
        return self._uuid


def compile_one(
    group: str, backend: str = "inductor", fn: Callable[..., Any] = one_way, **arguments: Any
) -> list[tuple[str, bool]]:
    """Compiles and runs; the pattern of each site that is reported, and whether it is fused."""
    torch._dynamo.reset()
    x, w = operands()
    with autofuse.debug() as report:
        y = torch.compile(fn, backend=backend, **arguments)(x, w, group)
    torch.testing.assert_close(y, fn(x, w, group))  # the fake group leaves values as they are
    return [(site.pattern or "", site.fused) for site in report.sites]


FUSED, KEPT = [("matmul_all_reduce", True)], [("matmul_all_reduce", False)]


def test_it_holds_inside_and_for_what_is_compiled_late(group: str) -> None:
    x, w = operands(requires_grad=True)
    assert compile_one(group) == []
    with autofuse.debug() as report:
        with autofuse.enable(policy="always"):
            assert compile_one(group) == FUSED
            y = torch.compile(both_ways, fullgraph=True)(x, w, group)
        assert compile_one(group) == []
        y.sum().backward()
    assert [graph.kind for graph in report.graphs] == ["inference", "forward", "backward"]
    assert [site.fused for site in report.sites] == [True, True, False]


def test_the_latest_counts_and_each_is_taken_away_by_itself(group: str) -> None:
    outer = autofuse.enable(policy="always")
    with autofuse.enable(policy="never"):
        assert compile_one(group) == KEPT
        with outer:  # ends before the inner one
            pass
        assert compile_one(group) == KEPT
    assert compile_one(group) == []
    autofuse.enable(policy="never")
    autofuse.enable(policy="always")
    assert compile_one(group) == FUSED
    autofuse.disable()
    assert compile_one(group) == []


def test_it_holds_on_all_threads(group: str) -> None:
    """The configuration of Inductor is one of each thread, from torch 2.13 on."""
    found: list[Any] = []
    with autofuse.enable(policy="always"):
        thread = threading.Thread(target=lambda: found.append(compile_one(group)))
        thread.start()
        thread.join()
    assert found == [FUSED]


def test_the_backend_by_name_fuses_once(group: str) -> None:
    with autofuse.enable(policy="never"):
        assert compile_one(group, "autofuse", options={"policy": "always"}) == FUSED
        assert compile_one(group, options={"post_grad_custom_pre_pass": autofuse.custom_pass()}) == KEPT


@pytest.mark.parametrize("where", ["config", "options", "list"])
def test_other_passes_run_and_belong_to_the_key(group: str, where: str) -> None:
    counters = torch._dynamo.utils.counters
    hits = []
    with fresh_cache(), autofuse.enable(policy="always"):
        for uuid in ("one", "one", "two"):
            mine = Counting(uuid)
            both = {"post_grad_custom_pre_pass": [mine] if where == "list" else mine}
            both |= {"joint_custom_post_pass": both["post_grad_custom_pre_pass"]}
            counters.clear()
            with torch._inductor.config.patch({} if where == "options" else both):
                assert compile_one(group, options=both if where == "options" else {}) == FUSED
            found = counters["inductor"]  # another object after the first compilation of a process
            hits.append((found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]))
            assert mine.graphs == 2
    assert hits == [(0, 1), (1, 0), (0, 1)]


def test_passes_of_the_configuration_that_do_not_run(group: str) -> None:
    """One that the options turn off, and one of ours, of a compilation that is under way."""
    hook, mine = "post_grad_custom_pre_pass", Counting()
    with autofuse.enable(policy="always"), torch._inductor.config.patch({hook: mine}):
        assert compile_one(group, options={hook: None}) == FUSED
    assert mine.graphs == 0
    ours, patches = fusion_pass(0, settings(policy="never"))
    with autofuse.enable(policy="always"), torch._inductor.config.patch(patches):
        assert compile_one(group) == FUSED
    assert not ours.ran


def test_caches_tell_stock_from_enabled(group: str) -> None:
    counters = torch._dynamo.utils.counters
    with fresh_cache():
        assert compile_one(group) == []
        with autofuse.enable(policy="always"):
            counters.clear()
            assert compile_one(group) == FUSED
            assert counters["inductor"]["fxgraph_cache_miss"] == 1
            assert compile_one(group) == FUSED
            assert counters["inductor"]["fxgraph_cache_hit"] == 1
        with autofuse.enable(policy="never"):
            assert compile_one(group) == KEPT
            assert counters["inductor"]["fxgraph_cache_miss"] == 2
        counters.clear()
        assert compile_one(group) == []
        assert counters["aot_autograd"]["autograd_cache_hit"] == 1


def test_modes_and_dynamic_sizes(group: str) -> None:
    x, w = operands()
    with autofuse.enable(policy="always"):
        compiled = torch.compile(one_way, mode="max-autotune-no-cudagraphs", dynamic=True)
        with autofuse.debug() as report:
            for rows in (2, 5, 6):
                torch.testing.assert_close(compiled(x[:rows], w, group), (x[:rows] @ w).relu())
    assert [site.fused for site in report.sites] == [True]


@pytest.mark.parametrize("backend", ["inductor", "autofuse"])
def test_modes_that_tune_measure_ways(group: str, backend: str) -> None:
    with autofuse.enable(), patch("autofuse.backend.FusionPass", side_effect=RuntimeError):
        for mode, measures in {"reduce-overhead": False, "max-autotune-no-cudagraphs": True}.items():
            with pytest.raises(RuntimeError):
                compile_one(group, backend, mode=mode)
            assert autofuse.config.measure == measures


def test_torch_without_distributed_compiles_as_before(group: str) -> None:
    # Dynamo keeps what torch.distributed says, so that is not patched.
    with autofuse.enable(policy="always"), patch("autofuse.enabling._has_collectives", return_value=False):
        assert compile_one(group) == []


def test_compiled_autograd(group: str) -> None:
    x, w = operands(requires_grad=True)
    with (
        autofuse.enable(policy="always"),
        autofuse.debug() as report,
        torch._dynamo.config.patch(compiled_autograd=True),
    ):
        step = torch.compile(lambda: both_ways(x, w, group).sum().backward())
        step()
    assert "all_reduce" in {site.collective for site in report.sites}
    torch.testing.assert_close(w.grad, x.detach().sum(0)[:, None].expand_as(w))


def test_nested_regions(group: str) -> None:
    """A region is a subgraph, which is compiled once."""

    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return one_way(x, w, group)

    def fn(x: torch.Tensor, w: torch.Tensor, group: str) -> torch.Tensor:
        return region(region(x, w) @ w.t(), w)

    with autofuse.enable(policy="always"), fresh_cache():
        for _ in range(2):
            assert set(compile_one(group, fn=fn)) == set(FUSED)


def test_regions_belong_to_the_key(group: str) -> None:
    """Their lines, too: ranks compare the lines of their calls."""
    inner = fx.Graph()
    x, w = inner.placeholder("x"), inner.placeholder("w")
    reduce = inner.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", group))
    inner.output((inner.call_function(torch.ops.aten.mm.default, (reduce, w)),))
    around = fx.Graph()
    around.output((around.get_attr("region"),))
    outer = fx.GraphModule({"region": fx.GraphModule({}, inner)}, around)

    def key(line: int) -> str:
        reduce.meta["stack_trace"] = f'File "model.py", line {line}, in f'
        return autofuse.passes.circumstances(outer.graph)

    assert key(1) != key(2)
    assert key(1) == key(1)


@pytest.mark.full
def test_flex_attention_beside_a_fused_op(group: str) -> None:
    """The forward: torch has no backward of it on CPUs."""

    def fn(x: torch.Tensor, w: torch.Tensor, group: str) -> torch.Tensor:
        heads = x.view(1, 2, 32, 16)
        attended = flex_attention(heads, heads, heads)
        return funcol.all_reduce(attended.transpose(1, 2).reshape(32, 32) @ w, "sum", group)

    torch._dynamo.reset()
    x, w = torch.rand(32, 32), torch.rand(32, 8)
    with torch.no_grad(), autofuse.enable(policy="always"), autofuse.debug() as report:
        y = torch.compile(fn, fullgraph=True)(x, w, group)
    assert [(site.pattern, site.fused) for site in report.sites] == FUSED
    assert "flex_attention" in str(report.graphs[-1].after)  # the first are its subgraphs
    torch.testing.assert_close(y, fn(x, w, group))


def test_what_is_compiled_for_a_file_is_left_alone(group: str, caplog: pytest.LogCaptureFixture) -> None:
    x, w = operands()
    with autofuse.enable(policy="always"), autofuse.debug() as report:
        compiled = torch.compile(lambda x, w: one_way(x, w, group), fullgraph=True).aot_compile(((x, w), {}))
    torch.testing.assert_close(compiled(x, w), (x @ w).relu())
    assert not report.sites
    assert "compiled for a file" in caplog.text


def test_options_are_checked_when_it_is_enabled() -> None:
    with pytest.raises(ValueError, match=r"'polcy'.*did you mean 'policy'"):
        autofuse.enable(polcy="auto")
    with pytest.raises(ValueError, match=r"policy='sometimes'"):
        autofuse.enable(policy="sometimes")
    with pytest.raises(ValueError, match=r"'max_autotune' is an option of Inductor"):
        autofuse.custom_pass(max_autotune=True)


def test_explaining_a_script_counts_what_is_enabled(group: str) -> None:
    with explaining() as report:
        torch.compile(one_way)(*operands(), group)
        with autofuse.enable(policy="never"):
            torch.compile(one_way, mode="max-autotune-no-cudagraphs")(*operands(), group)
    assert [site.reason for site in report.sites] == [autofuse.Reason.POLICY_NEVER]


# --- As a pass of another compiler ------------------------------------------------------------------------


class Manager(CustomGraphPass):
    """As vLLM has it: one pass that runs a list of passes."""

    def __init__(self, *passes: CustomGraphPass) -> None:
        self.passes = passes

    def __call__(self, graph: fx.Graph) -> None:
        for each in self.passes:
            each(graph)

    def uuid(self) -> list[Any]:
        return [each.uuid() for each in self.passes]


@pytest.mark.parametrize("hook", ["post_grad_custom_pre_pass", "post_grad_custom_post_pass"])
def test_a_custom_pass_in_a_list_of_another_compiler(group: str, hook: str) -> None:
    counting = Counting()
    with fresh_cache():
        for policy, found in {"always": FUSED, "never": KEPT}.items():
            manager = Manager(counting, autofuse.custom_pass(policy=policy))
            assert compile_one(group, options={hook: manager}) == found
            assert compile_one(group, options={hook: copy.deepcopy(manager)}) == []  # from a cache
    assert counting.graphs == 2


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="Inductor takes one pass, no list")
def test_a_custom_pass_in_a_list_of_inductor(group: str) -> None:
    """As docs/enabling.md sets it."""
    counting = Counting()
    passes = [counting, autofuse.custom_pass(policy="always")]
    with fresh_cache(), torch._inductor.config.patch(post_grad_custom_post_pass=passes):
        assert compile_one(group) == FUSED
    assert counting.graphs == 1


def test_a_custom_pass_is_known_by_all_that_it_depends_on(group: str) -> None:
    mine = autofuse.custom_pass()
    sent: CustomPass = pickle.loads(pickle.dumps(mine))
    assert sent.uuid() == mine.uuid()
    others = {autofuse.custom_pass(policy="never").uuid(), autofuse.custom_pass(order="ring").uuid()}
    one = dist.new_group([0])
    others.add(mine.uuid())
    dist.destroy_process_group(one)
    assert len({sent.uuid(), *others}) == 4


# --- Without a line of code -------------------------------------------------------------------------------

LOADED = """
import sys, torch
ours = sorted(name for name in sys.modules if name.split(".")[0] == "autofuse")
slow = sorted(name for name in ("sympy", "torch._inductor.custom_graph_pass") if name in sys.modules)
changed = hasattr(torch._TorchCompileInductorWrapper.__call__, "__wrapped__")
print(ours, slow, changed, sys.modules["autofuse.enabling"].enabled())
"""


@pytest.mark.parametrize("value", ["", "0", "1"])
def test_the_entry_point_loads_one_small_module(tmp_path: Path, value: str) -> None:
    (tmp_path / "loaded.py").write_text(LOADED)
    done = run_with_entry_point(tmp_path, [tmp_path / "loaded.py"], AUTOFUSE_ENABLE=value)
    state = "True {}" if value == "1" else "False None"
    assert done.strip() == f"['autofuse', 'autofuse.enabling'] [] {state}"

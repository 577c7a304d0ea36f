"""What has run at a site, joined with reports that were made while it was compiled."""

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import autofuse
from autofuse import Report
from autofuse.lowering import runs
from autofuse.lowering.ops.library import NO_KERNEL
from autofuse.lowering.runs import MEASURED, PREDICTED, Ran, Run, SiteKey, Timed, fell_back, ran
from autofuse.native_kernels import cpu
from autofuse.passes import report as report_module
from autofuse.passes.ran import MOST_LINES, State
from autofuse.passes.report import GraphReport, Listing, Site
from tests.frontend.test_report import KEPT, SITE
from tests.passes.dense import group as everybody
from tests.passes.harness import fake_group
from tests.ranks import RankPool, fresh_group

Ranks = Callable[[int], RankPool]

OP, W = "matmul_all_reduce", (64, 32)
TWO_SHOT, WORDS = Timed("cublas+two_shot", 61.04, MEASURED), Timed("words rows=64", 13.06, PREDICTED)


@pytest.fixture(autouse=True)
def nothing_has_run() -> None:
    runs.forget()


def _site(line: int, rows: int | None = 8) -> Site:
    return replace(
        SITE,
        source=f"/home/me/llama/model.py:{line}",
        key=SiteKey.of(OP, f"/home/me/llama/model.py:{line}", "g", ((rows, 64), W)),
    )


def _ran(line: int, way: Timed, fused: bool, rows: int = 8, captured: bool = False, group: str = "g") -> None:
    key = SiteKey.of(OP, f"/cache/of/another/rank/model.py:{line}", group, ((rows, 64), W))
    ran(key, Run(key.shapes, way, fused, captured, TWO_SHOT, WORDS))


def _report(*sites: Site) -> Report:
    return Report([GraphReport("forward 0", "forward", Listing(), Listing(), sites)])


def test_a_report_is_joined_with_what_runs_when_it_is_read() -> None:
    fused, as_torch, fell, waits = map(_site, (1, 2, 3, 4))
    report = _report(fused, as_torch, fell, waits, KEPT)
    assert str(report).startswith("autofuse: 4 fused (not yet run), 1 kept in 1 graph")
    _ran(1, WORDS, fused=True)
    _ran(2, TWO_SHOT, fused=False)
    _ran(2, TWO_SHOT, fused=False, captured=True)
    for _ in range(3):
        assert fell.key is not None
        fell_back(fell.key, "no room")
    expected = [State.FUSED, State.AS_TORCH, State.FELL_BACK, State.NOT_RUN, State.KEPT]
    assert [site.state for site in report.sites] == expected
    assert report.counts == dict.fromkeys(State, 1)
    text = str(report)
    assert text.startswith("autofuse: 2 fused (1 not yet run), 1 as torch, 1 fell back, 1 kept in 1 graph")
    for line in (
        "  llama/model.py:1, matmul_all_reduce of 4 ranks",
        "    [8, 64] [64, 32]: words rows=64, 13.1 us predicted; best of torch: two-shot, 61.0 us measured",
        "    fell back 3 times: no room",
    ):
        assert line in text.splitlines(), text
    assert "not yet run" in next(line for line in text.splitlines() if "model.py:4" in line)


def test_torchs_way_is_told_with_the_reason() -> None:
    site = _site(2)
    report = _report(site)
    cases = {
        "as torch: two-shot is fastest here, 61.0 us measured; best of ours: tiles, 70.0 us measured": (
            Run((), TWO_SHOT, False, False, TWO_SHOT, Timed("tiles", 70.0, MEASURED))
        ),
        "as torch: NCCL is fastest where the host launches each call, 24.0 us measured; best of ours: "
        "words rows=64, 13.1 us predicted": Run(
            (), Timed("cublas+nccl", 24.0, MEASURED), False, False, TWO_SHOT, WORDS
        ),
        "as torch: NCCL is fastest here, as far as sizes tell": Run((), Timed("cublas+nccl"), False),
    }
    for text, run in cases.items():
        assert site.key is not None
        ran(site.key, run)
        assert text in str(report)


def test_the_latest_way_of_a_kind_of_call_counts() -> None:
    report = _report(_site(1))
    _ran(1, WORDS, fused=True)
    _ran(1, TWO_SHOT, fused=False)
    assert report.sites[0].state is State.AS_TORCH
    _ran(1, WORDS, fused=True, captured=True)
    assert report.sites[0].state is State.FUSED
    assert len(report.sites[0].runs) == 2


def test_calls_of_other_sites_do_not_count() -> None:
    """Two layers of one line differ by sizes; a site of dynamic size has calls of any."""
    one, other, dynamic = _site(1, 8), _site(1, 16), _site(1, None)
    _ran(1, WORDS, fused=True)
    _ran(1, WORDS, fused=True, group="another")
    _ran(7, WORDS, fused=True)
    assert [len(site.runs) for site in (one, other, dynamic)] == [1, 0, 1]
    _ran(1, WORDS, fused=True, rows=16)
    assert [run.shapes[0] for run in dynamic.runs] == [(8, 64), (16, 64)]


def test_many_sizes_are_few_lines_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MOST", 40)
    report = _report(_site(1, None))
    for rows in range(100):
        _ran(1, WORDS, fused=True, rows=rows)
    assert len(report.sites[0].runs) == 40
    assert report.sites[0].runs[-1].shapes[0] == (99, 64)
    lines = str(report).splitlines()
    assert sum("words rows=64" in line for line in lines) == MOST_LINES
    assert any(line.strip() == f"... and {40 - MOST_LINES} more kinds of calls" for line in lines)


def test_json_keeps_what_had_run_and_old_files_are_read() -> None:
    report = _report(_site(1), _site(2), KEPT)
    _ran(1, WORDS, fused=True)
    assert report.sites[1].key is not None
    fell_back(report.sites[1].key, "no room")
    text, printed = report.to_json(), str(report)
    runs.forget()
    again = Report.from_json(text)
    assert str(again) == printed
    assert again == report
    assert again.to_json() == text
    assert GraphReport.from_json(again.graphs[0].to_json()).sites[0].state is State.FUSED
    old = text.replace('"ran"', '"_"').replace('"key"', '"_"')
    data = json.loads(old)
    for site in data["graphs"][0]["sites"]:
        for name in ("_", "state"):
            site.pop(name, None)
    assert [s.state.value for s in Report.from_json(json.dumps(data)).sites] == ["not yet run"] * 2 + ["kept"]


def test_a_pickled_report_keeps_what_had_run() -> None:
    """The rank that gathers reports has run other calls."""
    report = _report(_site(1), KEPT)
    _ran(1, WORDS, fused=True)
    sent, printed = pickle.dumps(report), str(report)
    runs.forget()
    again = pickle.loads(sent)
    assert str(again) == printed
    assert again == report
    assert report.sites[0].state is State.NOT_RUN


def test_a_report_agrees_while_other_threads_compile_and_run() -> None:
    report = _report(_site(1))
    of_site = report_module.of_site

    def meanwhile(key: SiteKey) -> Ran:
        found = of_site(key)
        _ran(1, WORDS, fused=True)
        report.add(GraphReport("forward 1", "forward", Listing(), Listing(), (KEPT,)))
        return found

    for read in (Report.to_json, Report.__str__):
        runs.forget()
        del report.graphs[1:]
        with patch.object(report_module, "of_site", meanwhile):
            told = read(report)
        if read is Report.to_json:
            data = json.loads(told)
            assert (len(data["graphs"]), data["counts"]["fused"], data["counts"]["kept"]) == (1, 0, 0)
            assert data["graphs"][0]["sites"][0]["state"] == "not yet run"
        else:
            assert told.splitlines()[0] == "autofuse: 1 fused (not yet run), 0 kept in 1 graph"
            assert "words" not in told
            assert KEPT.source not in told


def reduced(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_reduce(x @ w, "sum", everybody()).relu()


def gathered_twice(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Two sites that become one op."""
    a = funcol.all_gather_tensor(x, 0, everybody()) @ v
    return a + funcol.all_gather_tensor(x, 0, everybody()) @ w


def _states(report: Report) -> list[str]:
    return [site.state.value for site in report.sites]


def _compiled_anew(fn: Callable[..., Any], *args: Tensor) -> tuple[Report, int]:
    """The report of a first call, and hits of Inductor's cache."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with autofuse.debug() as report:
        torch.compile(fn, backend="autofuse", options={"policy": "always"})(*args)
    return report, torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]


def _runs(rank: int, world: int, folder: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{rank}"
    runs.forget()
    x, w = torch.ones(8, 6), torch.ones(6, 4)
    with autofuse.config.patch(policy="always"):
        explained = autofuse.explain(reduced)(x, w)
        assert _states(explained) == ["not yet run"]
        cold, hits = _compiled_anew(reduced, x, w)
        assert (_states(cold), hits) == (["fused"], 0)
        assert _states(explained) == _states(autofuse.explain(reduced)(x, w)) == ["fused"]
        warm, hits = _compiled_anew(reduced, x, w)
        assert (_states(warm), hits) == (["fused"], 1)
        (run,) = warm.sites[0].runs
        assert (run.shapes, run.way.name) == (((8, 6), (6, 4)), "plan, one shot")
        with autofuse.debug() as report:
            dynamic = torch.compile(gathered_twice, backend="autofuse", dynamic=True)
            for rows in (8, 16, 8):
                dynamic(torch.ones(rows, 6), w, w + 1)
        assert _states(report) == ["fused"] * 2
        for site in report.sites:
            assert [run.shapes[0] for run in site.runs] == [(8, 6), (16, 6)]
            assert site.runs[0].way.name == "plan, direct"


def _calls_one_place(rank: int, world: int) -> None:
    """Calls of one op and place that differ in K alone, which plans do not know."""
    runs.forget()
    for k in (6, 16, 6):
        autofuse.ops.matmul_all_reduce(torch.ones(8, k), torch.ones(k, 4))
    sizes = [run.shapes for run in runs.of_op(OP)]
    assert sizes == [((8, 6), (6, 4)), ((8, 16), (16, 4))]


def test_calls_of_one_place_are_told_by_all_their_sizes(ranks: Ranks) -> None:
    ranks(2).run(_calls_one_place)


def _gets_room_later(rank: int, world: int) -> None:
    """The first calls find no shared memory for what they need; a later one does."""
    runs.forget()
    group, x, w = fresh_group(), torch.ones(64, 512), torch.ones(512, 1024)
    site = SiteKey.of(OP, "eager", group, ((64, 512), (512, 1024)))
    autofuse.ops.matmul_all_reduce(x[:1], w, group=group)
    with patch.object(cpu, "create_segment", side_effect=cpu.NoRoom("no room")):
        for _ in range(2):
            autofuse.ops.matmul_all_reduce(x, w, group=group)
    told = runs.of_site(site)
    assert told.runs == ()
    assert [each.count for each in told.fell_back] == [2]
    for _ in range(2):
        autofuse.ops.matmul_all_reduce(x, w, group=group)
    told = runs.of_site(site)
    assert [run.fused for run in told.runs] == [True]
    assert told.fell_back[0].count == 2
    autofuse.ops.matmul_all_reduce(x.double(), w[:, :8].double(), group=group)
    (told_of_double,) = runs.of_site(replace(site, shapes=((64, 512), (512, 8)))).fell_back
    assert told_of_double.why == NO_KERNEL


def test_what_finds_room_later_is_fused_then(ranks: Ranks) -> None:
    ranks(2).run(_gets_room_later)


def test_ranks_join_reports_also_after_hits_of_the_compile_cache(ranks: Ranks, tmp_path: Any) -> None:
    ranks(2).run(_runs, str(tmp_path), timeout=120)


def test_what_falls_back_is_counted_with_its_reason() -> None:
    x, w = torch.ones(4, 6), torch.ones(6, 8)
    with fake_group(2), autofuse.debug() as report:
        torch._dynamo.reset()
        compiled = torch.compile(reduced, backend="autofuse", options={"policy": "always"})
        for _ in range(3):
            compiled(x, w)
        assert _states(report) == ["fell back"]
        (told,) = report.sites[0].fell_back
        assert (told.why, told.count, told.shapes) == ("the group is fake", 3, ((4, 6), (6, 8)))

import copy
import dataclasses
import pickle
import threading

import pytest

from autofuse import Reason, Report, Site
from autofuse.lowering.orders import PlanShape
from autofuse.passes.report import GraphReport, Line, Listing, Prediction, collecting, publish

SITE = Site(
    pattern="matmul_all_reduce",
    op="autofuse::matmul_all_reduce",
    fused=True,
    reason=None,
    detail="",
    graph="forward 0",
    collective="all_reduce",
    source="model.py:12",
    nbytes=4096,
    world=4,
    order="direct",
    prediction=Prediction(12.5, 20.0, "12.5", "20", "always", "cpu"),
    plan=PlanShape("matmul_all_reduce", "direct", 4, (((8, 8),) * 4,), (8, 8)),
)
KEPT = dataclasses.replace(
    SITE, op=None, fused=False, reason=Reason.REDUCE_OP, detail="max", order=None, prediction=None, plan=None
)
GRAPH = GraphReport(
    "forward 0",
    "forward",
    Listing((Line("mm", "mm = aten.mm(x, w)", "model.py:12", 0), Line("y", "y = wait(mm)", None, None))),
    Listing(),
    (SITE, KEPT),
)


def test_a_report_sorts_sites() -> None:
    report = Report([GRAPH])
    assert report.sites == (SITE, KEPT)
    assert report.fused == (SITE,)
    assert report.kept == (KEPT,)


def test_a_report_survives_json() -> None:
    report = Report([GRAPH], ["async_op=True"])
    again = Report.from_json(report.to_json())
    assert again == report
    assert again.kept[0].reason is Reason.REDUCE_OP


def test_the_table_shows_every_site_and_advice_for_the_kept() -> None:
    text = str(Report([GRAPH], ["async_op=True for distributed collectives\n  long story"]))
    assert text.splitlines()[0] == "autofuse: 1 fused (not yet run), 1 kept in 1 graph"
    assert "matmul_all_reduce" in text
    assert "model.py:12" in text
    assert "reduce_op: max" in text
    assert Reason.REDUCE_OP.advice in text
    assert "async_op=True" in text
    assert "long story" not in text


def test_an_empty_report_prints() -> None:
    assert str(Report()) == "autofuse: 0 fused, 0 kept in 0 graphs"


def test_sites_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SITE.fused = False  # type: ignore[misc]


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_code_and_advice(reason: Reason) -> None:
    assert reason.value == reason.name.lower()
    assert reason.advice
    assert Reason(reason.value) is reason
    assert pickle.loads(pickle.dumps(reason)) is reason
    assert copy.deepcopy(reason) is reason


def test_collectors_nest_and_hear_other_threads() -> None:
    with collecting() as outer:
        with collecting() as inner:
            thread = threading.Thread(target=publish, args=(GRAPH,))
            thread.start()
            thread.join()
        publish(GRAPH)
    publish(GRAPH)
    assert len(inner.graphs) == 1
    assert len(outer.graphs) == 2

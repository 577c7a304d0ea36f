"""The front end is tested apart from the matcher: `report_collectives` stands in for the pass."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from autofuse import config, passes
from autofuse.passes.graph.listing import listing
from autofuse.passes.reasons import Reason
from autofuse.passes.report import GraphReport, Site


def report_collectives(
    graph: fx.Graph, settings: passes.Settings, kind: str, name: str, basis: object = None
) -> GraphReport:
    """Keeps every collective, because of the policy."""
    sites = tuple(
        Site(
            pattern=None,
            op=None,
            fused=False,
            reason=Reason.POLICY_NEVER,
            detail=settings.policy,
            graph=name,
            collective=node.target.__name__.split(".")[0],
            source=None,
            nbytes=None,
            world=None,
            order=None,
            prediction=None,
        )
        for node in graph.nodes
        if getattr(node.target, "namespace", "") == "_c10d_functional" and "wait" not in str(node.target)
    )
    return GraphReport(name, kind, listing(graph), listing(graph), sites)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fuse", "fuse_or_keep"):
        monkeypatch.setattr(passes, name, report_collectives)


@pytest.fixture
def group() -> Iterator[str]:
    """Name of a group of four ranks that exchange nothing."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def measures_nothing() -> Iterator[None]:
    """Afterwards: `mode="max-autotune-no-cudagraphs"` makes the process measure."""
    with config.patch(measure=False):
        yield

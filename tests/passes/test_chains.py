"""Random chains round a collective: what can be expressed is fused, and the numbers are those of eager."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import autofuse

from .chains import CHAINS, Chain, arguments, program
from .harness import fake_group
from .oracle import verdict

FUSED = {
    "all_reduce": torch.ops.autofuse.matmul_all_reduce.default,
    "reduce_scatter": torch.ops.autofuse.matmul_reduce_scatter.default,
    "all_gather": torch.ops.autofuse.all_gather_matmul.default,
}


def drawn(examples: int) -> settings:
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def rewritten(chain: Chain) -> tuple[fx.GraphModule, str | None]:
    """The graph of a chain after the passes, and the reason if its site was kept."""
    with torch.no_grad():
        gm = make_fx(program(chain), tracing_mode="fake")(*arguments(chain))
    (site,) = autofuse.rewrite(gm).sites
    return gm, None if site.reason is None else site.reason.value


def place(gm: fx.GraphModule, collective: str) -> tuple[int, int] | None:
    """`(dim, outer)` of the fused op."""
    (node,) = gm.graph.find_nodes(op="call_function", target=FUSED[collective])
    first = {"all_reduce": None, "reduce_scatter": 5, "all_gather": 3}[collective]
    return None if first is None else tuple(node.args[first : first + 2])


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("collective", CHAINS)
def test_decisions(collective: str, world: int) -> None:
    seen: Counter[str | None] = Counter()

    @drawn(100)
    @given(CHAINS[collective](world))
    def check(chain: Chain) -> None:
        expected = verdict(chain)
        gm, reason = rewritten(chain)
        seen[reason] += 1
        assert reason == expected.reason, chain
        if reason is None and collective != "all_reduce":
            assert place(gm, collective) in expected.places, chain

    with fake_group(world), autofuse.config.patch(policy="always"):
        check()
    print(seen)

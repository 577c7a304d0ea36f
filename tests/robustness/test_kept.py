"""On real ranks a kept site has its reason and eager's numbers; in the full tier under Inductor.

Left to test_reasons.py: `no_kernel_for_device` (there is no other device here), and `group_unknown` and
`mixed_devices` (eager raises as well).
"""

import dataclasses
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

import autofuse
from autofuse import Reason
from autofuse.native_kernels import cpu
from autofuse.passes.choice.choose import Choice
from tests.passes.harness import passes_only
from tests.ranks import RankPool, fresh_group
from tests.robustness.seven import integers

Ranks = Callable[[int], RankPool]


def _reduce(x: Tensor, w: Tensor, group: Any) -> Tensor:
    return funcol.all_reduce(x @ w, "sum", group)


def _exchange(x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    return funcol.wait_tensor(funcol.all_to_all_single(x, received, sent, group))


def _uneven(x: Tensor, w: Tensor, group: Any) -> Tensor:
    """The program cuts its rows into equal parts, but rank 0 gets one and rank 1 three."""
    mine = [1, 3][dist.get_rank()]
    parts = (x @ w).view(2, 2, -1).transpose(0, 1).reshape(4, -1)
    return _exchange(parts, [1, 3], [mine, mine], group)


@contextmanager
def _no_gain() -> Iterator[None]:
    """The cost model says no. It is no part of a graph's identity that this test changes it."""
    module = importlib.import_module("autofuse.passes.choice.choose")
    real = module.predict

    def predict(*args: Any) -> Choice:
        prediction = dataclasses.replace(real(*args).prediction, wins="never")
        return Choice(prediction, fuse=False)

    with patch.object(module, "predict", predict):
        yield


def _fault() -> AbstractContextManager[Any]:
    return patch("autofuse.passes.fuse.choose", side_effect=KeyError("a fault"))


@dataclasses.dataclass(frozen=True)
class Case:
    fn: Callable[..., Any] = _reduce
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    alone: bool = False
    """In a group of this rank alone."""


CASES: dict[Reason, Case] = {
    Reason.NO_NATIVE_KERNELS: Case(around=lambda: patch.multiple(cpu, _library=None, _why_not="no compiler")),
    Reason.GROUP_SPANS_HOSTS: Case(around=lambda: patch.dict(os.environ, LOCAL_WORLD_SIZE="1")),
    Reason.SINGLE_RANK: Case(alone=True),
    Reason.REDUCE_OP: Case(lambda x, w, group: funcol.all_reduce(x @ w, "max", group)),
    Reason.DTYPE: Case(dtype=torch.float64),
    Reason.NO_COMPUTE: Case(lambda x, w, group: funcol.all_reduce(x, "sum", group) @ w),
    Reason.LAYOUT: Case(lambda x, w, group: funcol.all_reduce((x @ w) + w[:2].view(2, 1, 8), "sum", group)),
    Reason.EXTRA_USERS: Case(lambda x, w, group: funcol.all_reduce((y := x @ w) * y.sigmoid(), "sum", group)),
    Reason.UNEVEN: Case(_uneven),
    Reason.UNSUPPORTED_VARIANT: Case(options={"cpp_wrapper": True}),
    Reason.POLICY_NEVER: Case(options={"policy": "never"}),
    Reason.PATTERN_DISABLED: Case(options={"patterns": ["all_gather_matmul"]}),
    Reason.NOT_PROFITABLE: Case(options={"policy": "auto"}, around=_no_gain),
    Reason.PASS_FAILED: Case(around=_fault),
}


def _reasons(rank: int, world: int, generated: bool) -> dict[str, list[str | None]]:
    """Reasons of each case, None for what is fused, after a comparison with eager."""
    found = {}
    own = [dist.new_group([r]) for r in range(world)][rank].group_name
    for reason, case in CASES.items():
        torch._dynamo.reset()
        x, w = integers(rank, 4, 6).to(case.dtype), integers(7 + rank, 6, 8).to(case.dtype)
        group = own if case.alone else fresh_group()
        options = {"policy": "always", **case.options}
        how = (
            {"backend": "autofuse", "options": options} if generated else {"backend": passes_only(**options)}
        )
        compiled = torch.compile(case.fn, **how)
        with (
            autofuse.debug() as report,
            torch.no_grad(),
            case.around(),
            torch._inductor.config.patch(force_disable_caches=True),
        ):
            actual, expected = compiled(x, w, group), case.fn(x, w, group)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        found[reason.value] = [site.reason and site.reason.value for site in report.sites]
    return found


@pytest.mark.parametrize("generated", [False, pytest.param(True, marks=pytest.mark.full)])
def test_every_reason(ranks: Ranks, generated: bool) -> None:
    for found in ranks(2).run(_reasons, generated, timeout=220):
        assert found == {reason.value: [reason.value] for reason in CASES}


def test_no_reason_is_left_out() -> None:
    assert __doc__ is not None
    assert all((reason in CASES) != (f"`{reason.value}`" in __doc__) for reason in Reason)


def _embedding_with_max(rank: int, world: int) -> None:
    """Forward and backward."""
    torch._dynamo.reset()
    table = integers(rank, 20, 4).requires_grad_()
    indices = torch.arange(12).view(6, 2)

    def fn() -> Tensor:
        pooled = F.embedding_bag(indices, table, mode="max")
        return funcol.all_to_all_single_autograd(pooled, [3, 3], [3, 3], dist.group.WORLD).relu()

    grads = []
    for call in (fn, torch.compile(fn, backend="autofuse")):
        call().sum().backward()
        grads.append(table.grad)
        table.grad = None
    assert torch.equal(*grads)  # type: ignore[arg-type]


def test_training_with_max_pooling(ranks: Ranks) -> None:
    ranks(2).run(_embedding_with_max, timeout=120)

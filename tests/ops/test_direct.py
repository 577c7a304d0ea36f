"""Calls past the dispatcher: what an earlier one has prepared runs them, as long as it is there."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import autofuse
from autofuse.lowering import direct as module
from autofuse.lowering.direct import Direct
from autofuse.lowering.gpu.choice.quick import Quick
from autofuse.lowering.gpu.memory import workspace

pytest.importorskip("triton")

from tests.passes.harness import fake_group

X = torch.ones(4, 8, dtype=torch.bfloat16)


class Group:
    """In place of a process group."""


class Made:
    """What is prepared: it answers with how often it was asked."""

    def __init__(self, group: Group) -> None:
        self.group, self.calls = weakref.ref(group), 0


def test_a_call_like_an_earlier_one_is_run_by_what_that_prepared() -> None:
    groups = {"a": Group(), "b": Group()}
    held = {("a", 4): Made(groups["a"])}
    ran: list[Any] = []

    def run(*given: Any) -> str:
        ran.append(given)
        return "long"

    def again(made: Made, given: Any) -> Any:
        made.calls += 1
        return made.calls if given[0][0].dtype is torch.bfloat16 else None

    quick = Quick(
        lambda given: (given[0][0].shape[0], given[3], *given[-3:]) if given[0] else None,
        lambda found, args: held.get((found.name, args.x[0].shape[0])),
        again,
    )

    def call(x: Tensor | None = X, group: str = "a", product: str = "mm") -> Any:
        given = [
            [] if x is None else [x],
            [X.t()],
            [],
            product,
            "sum",
            False,
            [],
            "",
            "",
            group,
            "direct",
            "eager",
        ]
        return direct(*given)

    with (
        patch.object(module, "resolve_group", lambda name: groups[name]),
        patch.object(workspace, "made_of", lambda group: SimpleNamespace(name="ab"[group is groups["b"]])),
    ):
        direct = Direct("matmul_all_reduce", run, quick)
        assert [call(), call(), call()] == ["long", 1, 2]
        assert [call(X.half()), call(X[:2]), call(X[:2]), call(None)] == ["long"] * 4  # declined; none; none
        assert [call(group="b"), call(group="b")] == ["long"] * 2
        # What GPUs do not take leaves no trace, even where something is prepared for operands like these.
        assert [call(product="mm; to float64"), call(product="mm; to float64")] == ["long"] * 2
        groups["a"] = Group()  # another one of the same name
        assert call() == "long"
        assert held["a", 4].calls == 3
        held.clear()
        gc.collect()
        count = len(ran)
        assert [call(), len(ran)] == ["long", count + 1]


def test_eager_calls_take_the_dispatcher_where_it_has_something_to_do() -> None:
    """For gradients, subclasses, modes and tracing; and for tensors that are not on GPUs."""
    with patch.object(module, "PLAIN", (Tensor,)), patch.object(module, "direct") as direct:
        is_plain = module.is_plain
        assert not is_plain(([X], "mm"))  # on the CPU
        with patch.object(Tensor, "is_cuda", True, create=True):
            assert is_plain(([X], "mm"))
            trained = X.clone().requires_grad_()
            assert not is_plain(([X], [trained]))
            with torch.no_grad():
                assert is_plain(([X], [trained]))
            assert not is_plain(([X.as_subclass(torch.nn.Buffer)],))
            assert module.nobody_intervenes()
            with torch.device("cpu"):
                assert not module.nobody_intervenes()
            module.call("matmul_all_reduce", [X])
        direct.assert_called_once_with("matmul_all_reduce")
    with fake_group(2):
        traced = autofuse.explain(lambda x: autofuse.ops.matmul_all_reduce(x, x.t()))(X)
        assert not traced.sites

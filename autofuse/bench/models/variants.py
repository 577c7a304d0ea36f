"""The ways to compile a model, by name."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autofuse.bench.models.collectives import in_symmetric_memory, without
from autofuse.bench.models.rows import CEILING, DECLARED, NO_TAILS, OURS
from autofuse.bench.models.work import Forward

_BEFORE = "post_grad_custom_pre_pass"


@dataclass(frozen=True)
class Variant:
    """options: of the backend. An empty backend: eager."""

    backend: str = "inductor"
    options: Mapping[str, Any] = field(default_factory=dict)

    def compiled(self, forward: Forward) -> Forward:
        """The compiled forward, behind a new code object: dynamo caches compiled code by code object."""
        if not self.backend:
            return forward

        def call(*args: Any) -> Any:
            return forward(*args)

        return self.compile(call)

    def compile(self, call: Callable[..., Any]) -> Forward:
        """Compiles a plain function for this variant, as `compiled` does. The arguments keep their names."""
        assert isinstance(call, types.FunctionType)
        own = types.FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)
        compiled: Forward = torch.compile(
            own, backend=self.backend, options=dict(self.options) or None, dynamic=False
        )
        return compiled


VARIANTS = {
    "eager": Variant(""),
    "inductor": Variant(),
    "async TP": Variant(options={"_micro_pipeline_tp": True}),
    "one-shot": Variant(options={_BEFORE: in_symmetric_memory(once=True)}),
    "two-shot": Variant(options={_BEFORE: in_symmetric_memory(once=False)}),
    NO_TAILS: Variant("autofuse", options={"schedule": "unchanged"}),
    OURS: Variant("autofuse"),
    DECLARED: Variant("autofuse"),
    CEILING: Variant(options={_BEFORE: without()}),
}

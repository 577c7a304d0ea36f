"""The operator library `autofuse::` and the one record that declares a fused op."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from autofuse.lowering.cpu.rendezvous import NotShared
from autofuse.lowering.cpu.workspace import SharedMemoryFull
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.torch_internals import register_autograd, resolve_group

log = logging.getLogger(__name__)

LIBRARY = torch.library.Library("autofuse", "DEF")

FUSED_OPS: dict[str, "FusedOp"] = {}
"""The registered ops by name."""

_warned: set[str] = set()


@dataclass(frozen=True)
class FusedOp:
    """Everything that `register` needs to know of an op; its functions take its arguments, the group by name.

    Attributes:
        schema: name, arguments and returns; the last arguments are `Any group_name, str order, str site`. The
            group is a name or, from a graph that is compiled on one rank for all, a ProcessGroup.
        fake: shapes and dtypes of the result; safe for symbolic sizes.
        reference: the op with plain functional collectives; any backend, any device.
        cpu: runs the plan over shared memory; returns NotImplemented for what it leaves to the reference; all
            ranks must decide that alike.
        cuda: as `cpu`, on GPUs of one host; None where there is no kernel yet.
        plan_shape: what the plans that `cpu` runs are made from, of tensors shapes and dtypes alone; None
            where that is `PlanShape.of_any_size`.
        setup_context, backward: as `torch.library.register_autograd` takes them; None if it has no gradient.
    """

    schema: str
    fake: Callable[..., Any]
    reference: Callable[..., Any]
    cpu: Callable[..., Any]
    plan_shape: Callable[..., PlanShape] | None
    setup_context: Callable[..., None] | None
    backward: Callable[..., Any] | None
    cuda: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]


def register(op: FusedOp) -> None:
    """Defines `torch.ops.autofuse.<name>`: the plan on CPU ranks and GPUs of one host, elsewhere the
    reference."""

    def reference(*args: Any) -> Any:
        return op.reference(*_group_by_name(args))

    def planned(run: Callable[..., Any], *args: Any) -> Any:
        args = _group_by_name(args)
        try:
            result = run(*args)
            if result is not NotImplemented:
                return result
        except (NotShared, SharedMemoryFull) as error:
            if str(error) not in _warned:
                _warned.add(str(error))
                log.warning("autofuse::%s runs unfused: %s", op.name, error)
        return op.reference(*args)

    FUSED_OPS[op.name] = op
    LIBRARY.define(op.schema)
    devices: dict[str, Callable[..., Any]] = {
        "CPU": partial(planned, op.cpu),
        "CUDA": reference if op.cuda is None else partial(planned, op.cuda),
        "XPU": reference,
        "PrivateUse1": reference,
    }
    for device, run in devices.items():
        LIBRARY.impl(op.name, run, device)
    qualified = f"autofuse::{op.name}"
    torch.library.register_fake(qualified, lambda *args: op.fake(*_group_by_name(args)), lib=LIBRARY)
    if op.setup_context is None or op.backward is None:
        return
    setup_context = op.setup_context
    register_autograd(
        LIBRARY,
        getattr(torch.ops.autofuse, op.name).default,
        op.backward,
        lambda ctx, inputs, output: setup_context(ctx, _group_by_name(inputs), output),
        devices,
    )


def _group_by_name(args: tuple[Any, ...]) -> tuple[Any, ...]:
    group = args[-3]
    return args if isinstance(group, str) else (*args[:-3], resolve_group(group).group_name, *args[-2:])

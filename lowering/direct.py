"""The fused ops past torch's dispatcher: for code that Inductor generates, and eager calls without gradients.

The dispatcher takes as long as all other work before a launch. `Direct` finds what an earlier call has
prepared, by the layouts of the operands and the other arguments. Generated code contains only the name of the
op, so that ranks share compiled code.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from functools import cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autofuse.lowering import host_reads
from autofuse.lowering.gpu.support import has_triton
from autofuse.lowering.ops.library import FUSED_OPS, IMPLEMENTATIONS, named
from autofuse.lowering.torch_internals import generate_calls, nobody_intervenes, order_calls, resolve_group

if TYPE_CHECKING:
    from autofuse.lowering.gpu.choice.quick import Quick

MOST_KINDS = 4096
"""The number of kinds of calls that an op keeps."""

MOST_TRIES = 64
"""How often an op looks for what calls of a kind have prepared. A look takes as long as a call."""


class Direct:
    """An op on one kind of device: `direct(*arguments)`, as `torch.ops.autofuse.<name>` is called."""

    def __init__(self, name: str, run: Callable[..., Any], quick: Quick | None) -> None:
        self._op, self._run, self._quick = FUSED_OPS[name], run, quick
        # Weak, as prepared calls end with their group, with its memory, and when ways are chosen anew.
        self._known: dict[Hashable, weakref.ref[Any]] = {}
        self._tried: dict[Hashable, int] = {}

    def __call__(self, *given: Any) -> Any:
        if self._quick is None:
            return self._run(*given)
        given = named(given)  # kinds keep no group alive
        kind = self._quick.kind(given)
        found = self._known.get(kind)
        made = None if found is None else found()
        if made is not None and made.group() is resolve_group(given[-3]):
            result = self._quick.again(made, given)
            if result is not None:
                return result
        result = self._run(*given)
        if kind is not None and self._tried.get(kind, 0) < MOST_TRIES:
            self._remember(kind, given)
        return result

    def _remember(self, kind: Hashable, given: tuple[Any, ...]) -> None:
        from autofuse.lowering.gpu.memory.workspace import made_of

        if len(self._tried) == MOST_KINDS:  # sizes may change without end
            self._tried.clear()
            self._known.clear()
        self._tried[kind] = self._tried.get(kind, 0) + 1
        arguments = self._op.parse(given)
        workspace = made_of(resolve_group(given[-3]))
        if workspace is None or self._op.gpu_gap(arguments) or self._op.gpu_dtype_gap(arguments):
            return
        assert self._quick is not None
        made = self._quick.made(workspace, arguments)
        if made is not None:
            self._known[kind] = weakref.ref(made)


@cache
def direct(name: str) -> Direct:
    """The op of this name for tensors on GPUs."""
    return Direct(name, IMPLEMENTATIONS[name]["CUDA"], _quick().get(name))


@cache
def _quick() -> Mapping[str, Quick]:
    """The `Quick` of each op whose calls can be prepared, by the name of the op. Empty without Triton."""
    if not has_triton():
        return {}
    from autofuse.lowering.gpu.dense.call import QUICK as DENSE
    from autofuse.lowering.gpu.embedding.call import QUICK as EMBEDDING
    from autofuse.lowering.gpu.experts.call import QUICK as EXPERTS
    from autofuse.lowering.gpu.optimizer.again import QUICK as OPTIMIZER

    return {**DENSE, **EMBEDDING, **EXPERTS, **OPTIMIZER}


def call(name: str, *given: Any) -> Any:
    """Calls the op of this name from eager code. It skips the dispatcher if that would only find the op."""
    if torch.compiler.is_compiling():
        return getattr(torch.ops.autofuse, name)(*given)
    return call_known(name, nobody_intervenes() and is_plain(given), *given)


def call_known(name: str, plain: bool, *given: Any) -> Any:
    """As `call`, where it is known whether the arguments are plain."""
    if plain and nobody_intervenes():
        return direct(name)(*given)
    return getattr(torch.ops.autofuse, name)(*given)


def is_plain(given: tuple[Any, ...]) -> bool:
    """Whether all tensors are on GPUs, of no subclass, and none needs a gradient."""
    trains = torch.is_grad_enabled()
    for value in given:
        for t in value if type(value) is list else (value,):
            if isinstance(t, Tensor) and (
                type(t) not in PLAIN or not t.is_cuda or (trains and t.requires_grad)
            ):
                return False
    return True


PLAIN = (Tensor, torch.nn.Parameter)


class _Calls(ModuleType):
    """`torch.ops.autofuse.direct`, which generated code reaches without an import: `<op>_<device>`, and those
    of `host_reads`."""

    begin_read, read = staticmethod(host_reads.begin_read), staticmethod(host_reads.read)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op, _, device = name.rpartition("_")
        if op not in IMPLEMENTATIONS or device not in DEVICES:
            raise AttributeError(name)
        found = direct(op) if device == "cuda" else IMPLEMENTATIONS[op][device.upper()]
        setattr(self, name, found)
        return found


DEVICES = ("cpu", "cuda")


def _name_in_code(op: str, device: str) -> str:
    if device not in DEVICES:
        return f"torch.ops.autofuse.{op}.default"
    return f"torch.ops.autofuse.direct.{op}_{device}"


def _name_of_read(op: str, device: str) -> str:
    return f"torch.ops.autofuse.direct.{op}"


@cache
def generate_direct_calls() -> None:
    """From now on Inductor generates such calls, in the order of the graph."""
    order_calls("autofuse")
    generate_calls({f"autofuse.{op}": partial(_name_in_code, op) for op in FUSED_OPS})
    generate_calls(
        {f"autofuse.{op}": partial(_name_of_read, op) for op in (host_reads.BEGIN, host_reads.READ)}
    )


setattr(torch.ops.autofuse, "direct", _Calls("direct"))  # noqa: B010  (it is no op)

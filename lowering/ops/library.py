"""The operator library `autofuse::` and the one record that says what a fused op is."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, Generic, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from autofuse.lowering.cpu.rendezvous import NotShared
from autofuse.lowering.cpu.workspace import SharedMemoryFull
from autofuse.lowering.gpu.support import has_triton
from autofuse.lowering.orders import PlanShape
from autofuse.lowering.plan import FAMILIES, Family
from autofuse.lowering.runs import Run, SiteKey, Timed, fell_back, is_new, ran
from autofuse.lowering.torch_internals import register_autograd, resolve_group

log = logging.getLogger(__name__)

LIBRARY = torch.library.Library("autofuse", "DEF")

FUSED_OPS: dict[str, "FusedOp[Any]"] = {}
"""The registered ops by name."""

IMPLEMENTATIONS: dict[str, dict[str, Callable[..., Any]]] = {}
"""By name, what the dispatcher calls on each kind of device."""

COMMON = ("group_name", "order", "site")
"""The fields that end every record of arguments."""

SymInt: TypeAlias = Annotated[int, "SymInt"]
"""A size. While a graph is traced, a symbol may stand for it."""

SymInts: TypeAlias = Annotated[list[int], "SymInt[]"]

_SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    list[Tensor]: "Tensor[]",
    Tensor | None: "Tensor?",
    torch.dtype: "ScalarType",
    bool: "bool",
    list[bool]: "bool[]",
    int: "int",
    str: "str",
}

NO_KERNEL = "no kernel takes these operands"
"""Why a call falls back if nothing else is known."""

_warned: set[str] = set()

A = TypeVar("A", bound=tuple[Any, ...])


@dataclass(frozen=True)
class Gap(Generic[A]):
    """A kind of arguments that the GPU kernels of an op do not take.

    Attributes:
        holds: whether given arguments are of that kind. It reads options, dtypes, and numbers of tensors and
            dims, but no sizes: the arguments may be those of a graph, where sizes are symbols.
        why: the detail of a report; may have fields of the arguments, as `{0.product!r}`.
        remedy: what docs/reasons.md tells a user to do.
    """

    holds: Callable[[A], bool]
    why: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class FusedOp(Generic[A]):
    """Everything that is to be known of an op. Its functions take its arguments as one record.

    Attributes:
        name: the op is `torch.ops.autofuse.<name>`.
        arguments: the record, a NamedTuple: names and types of its fields are those of the schema. Its last
            fields are `group_name: str`, `order: str` and `site: str`.
        returns: the type of the result in the schema.
        family: how plans of the op move data.
        replaces: the collective that the op stands for; the cost model has its constants.
        fake: shapes and dtypes of the result; safe for symbolic sizes.
        reference: the op with plain functional collectives; any backend, any device.
        cpu: runs the plan over shared memory; returns NotImplemented for what it leaves to the reference. All
            ranks must decide alike.
        plan_shape: what the plans that `cpu` runs are made from, of shapes and dtypes of tensors alone; None
            where that is `PlanShape.of_any_size`.
        backward: `(ctx, arguments, gradient of the result) -> gradients by name of the argument`. An argument
            that the dict does not name has none. `ctx.needs` is a record that says for each argument whether
            a gradient is needed. None for an op without a gradient.
        save: `(ctx, arguments, result) -> arguments by name` that `backward` gets in place of those given;
            None or [] for tensors that it does not read. By default all are kept. It may set attributes of
            `ctx`.
        cuda: as `cpu`, on GPUs of one host; called with arguments in which `gpu_gap` finds no gap. None where
            there is no kernel. Imports its kernels when it is called: they need Triton.
        exchanged: the dtype that moves between the ranks, of an op that has kernels for GPUs; None where
            `gpu_gaps` check the dtypes instead of `gpu_dtypes`.
        gpu_dtypes: what `exchanged` may be on GPUs.
        gpu_gaps: all else that the GPU kernels do not take. Sizes are no matter of gaps: for those that it
            leaves to the reference, `cuda` returns NotImplemented.
        shapes: sizes by which a report distinguishes the calls of a site, such as the shapes of the first
            operands. No sizes that are new in each call.
    """

    name: str
    arguments: type[A]
    returns: str
    family: Family
    replaces: str
    fake: Callable[[A], Any]
    reference: Callable[[A], Any]
    cpu: Callable[[A], Any]
    plan_shape: Callable[[A], PlanShape] | None = None
    backward: Callable[[Any, A, Any], dict[str, Any]] | None = None
    save: Callable[[Any, A, Any], dict[str, Any]] | None = None
    cuda: Callable[[A], Any] | None = None
    exchanged: Callable[[A], torch.dtype | None] | None = None
    gpu_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    gpu_gaps: tuple[Gap[A], ...] = ()
    shapes: Callable[[A], Sequence[Sequence[int]]] = lambda args: ()

    @cached_property
    def schema(self) -> str:
        """The schema as torch takes it. It follows from the record, so that the two cannot differ."""
        hints = get_type_hints(self.arguments, include_extras=True)
        assert tuple(hints)[-3:] == COMMON, f"the arguments of {self.name} must end with {COMMON}"
        given = ", ".join(f"{_schema_type(name, hint)} {name}" for name, hint in hints.items())
        return f"{self.name}({given}) -> {self.returns}"

    def parse(self, given: tuple[Any, ...]) -> A:
        """The record of positional arguments."""
        return self.arguments(*named(given))

    def key(self, given: A) -> SiteKey:
        """Calls with these arguments, as `lowering.runs` has them; of a graph, those of a site."""
        *_, group_name, _, site = given
        shapes = tuple(tuple(n if isinstance(n, int) else None for n in dims) for dims in self.shapes(given))
        return SiteKey.of(self.name, site, group_name, shapes)

    def gpu_gap(self, given: A) -> str:
        """Why the GPU kernels do not take these arguments, dtypes apart; empty if they do."""
        if self.cuda is None:
            return "this op has no kernel for GPUs yet"
        for gap in self.gpu_gaps:
            if gap.holds(given):
                return gap.why.format(given)
        return ""

    def gpu_dtype_gap(self, given: A) -> str:
        """Why the GPU kernels do not take the dtype that is exchanged; empty if they do."""
        dtype = self.exchanged(given) if self.exchanged is not None else None
        if dtype is None or dtype in self.gpu_dtypes:
            return ""
        *most, last = map(dtype_name, self.gpu_dtypes)
        return f"{dtype_name(dtype)} is exchanged; GPU kernels take {', '.join(most)} and {last}"


def named(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Positional arguments with the name of the group. A graph that one rank compiles for all passes the
    group itself where others pass its name."""
    group = given[-3]
    return given if isinstance(group, str) else (*given[:-3], resolve_group(group).group_name, *given[-2:])


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _schema_type(name: str, hint: Any) -> str:
    if name == "group_name":
        return "Any"
    if get_origin(hint) is Annotated:
        return str(get_args(hint)[1])
    return _SCHEMA_TYPES[hint]


def register(op: FusedOp[A]) -> None:
    """Defines `torch.ops.autofuse.<name>`: the plan on CPU ranks and GPUs of one host, elsewhere the
    reference."""

    def reference(*given: Any) -> Any:
        return op.reference(op.parse(given))

    def on_cpu(arguments: A) -> Any:
        result = op.cpu(arguments)
        *_, group_name, order, site = arguments
        shapes = tuple(map(tuple, op.shapes(arguments)))
        if result is not NotImplemented and is_new((op.name, site, group_name, order, shapes)):
            key = op.key(arguments)
            ran(key, Run(key.shapes, Timed(_plan_of(op, arguments)), fused=True))
        return result

    devices: dict[str, Callable[..., Any]] = {
        "CPU": partial(_planned, op, on_cpu, lambda arguments: NO_KERNEL),
        "CUDA": on_cuda(op),
        "XPU": reference,
        "PrivateUse1": reference,
    }
    FUSED_OPS[op.name] = op
    IMPLEMENTATIONS[op.name] = devices
    FAMILIES[op.name] = op.family
    LIBRARY.define(op.schema)
    for device, run in devices.items():
        LIBRARY.impl(op.name, run, device)
    qualified = f"autofuse::{op.name}"
    torch.library.register_fake(qualified, lambda *given: op.fake(op.parse(given)), lib=LIBRARY)
    if op.backward is not None:
        overload = getattr(torch.ops.autofuse, op.name).default
        register_autograd(LIBRARY, overload, partial(_backward, op), partial(_setup_context, op), devices)


def on_cuda(op: FusedOp[A]) -> Callable[..., Any]:
    """The op for tensors on GPUs."""
    cuda = op.cuda
    if cuda is None:
        return lambda *given: op.reference(op.parse(given))

    def run(arguments: A) -> Any:
        if not has_triton() or op.gpu_gap(arguments) or op.gpu_dtype_gap(arguments):
            return NotImplemented
        return cuda(arguments)

    return partial(_planned, op, run, partial(_gap_of, op))


def _planned(op: FusedOp[A], run: Callable[[A], Any], why_not: Callable[[A], str], *given: Any) -> Any:
    """The result of `run` or, if that declines, of the reference."""
    arguments = op.parse(given)
    try:
        result = run(arguments)
        if result is not NotImplemented:
            return result
        why = why_not(arguments)
    except (NotShared, SharedMemoryFull) as error:
        why = str(error)
        if why not in _warned:
            _warned.add(why)
            log.warning("autofuse::%s runs unfused: %s", op.name, error)
    fell_back(op.key(arguments), why)
    return op.reference(arguments)


def _gap_of(op: FusedOp[A], arguments: A) -> str:
    """Why the GPU kernels have declined a call."""
    if not has_triton():
        return "Triton is not installed"
    return op.gpu_gap(arguments) or op.gpu_dtype_gap(arguments) or NO_KERNEL


def _plan_of(op: FusedOp[A], arguments: A) -> str:
    """The plan that an executor runs, as reports name it."""
    one_shot = op.plan_shape is not None and op.plan_shape(arguments).one_shot
    return "plan, one shot" if one_shot else f"plan, {arguments[-2]}"


# --- Autograd -----------------------------------------------------------------------------------------


def _setup_context(op: FusedOp[A], ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    given = op.parse(inputs)
    # For an argument without a gradient autograd expects None, for a list of tensors a list of None. It takes
    # an empty list of numbers for a list of tensors.
    ctx.no_gradients = [[None] * len(v) if _is_tensors(v) else None for v in given]
    kept = given if op.save is None else given._replace(**op.save(ctx, given, output))  # type: ignore[attr-defined]
    ctx.set_materialize_grads(False)
    ctx.places = []
    tensors: list[Tensor] = []
    for value in kept:
        several = _is_tensors(value)
        held = value if several else [value] if isinstance(value, Tensor) else None
        ctx.places.append((value, None, False) if held is None else (None, len(held), several))
        tensors += held or []
    ctx.save_for_backward(*tensors)


def _backward(op: FusedOp[A], ctx: Any, grad: Any) -> tuple[Any, ...]:
    tensors = iter(ctx.saved_tensors)
    values: list[Any] = []
    for value, count, several in ctx.places:
        held = [] if count is None else [next(tensors) for _ in range(count)]
        values.append(value if count is None else held if several else held[0])
    ctx.needs = op.arguments(*ctx.needs_input_grad)
    assert op.backward is not None
    found = op.backward(ctx, op.arguments(*values), grad)
    return tuple(
        found.get(name, nothing)
        for name, nothing in zip(op.arguments._fields, ctx.no_gradients, strict=True)  # type: ignore[attr-defined]
    )


def _is_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(t, Tensor) for t in value)

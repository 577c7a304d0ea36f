"""All private names of torch that autofuse uses. A new release of torch changes this file alone.

Every folder may import this module, and it imports none of them. Slow imports are inside functions.
"""

import itertools
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import sympy
import torch
from torch import fx
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed import ProcessGroup, Store
from torch.utils import _pytree as pytree

__all__ = ["CustomGraphPass"]

# --- Inductor and dynamo: the front end ---------------------------------------------------------------


def compile_fx(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inner_compile: Callable[..., Any],
    config_patches: dict[str, Any],
    region: str | None = None,
) -> Callable[..., Any]:
    """AOTAutograd and Inductor on a dynamo graph. `inner_compile` gets each forward and backward graph.

    AOTAutograd's own cache is off: after a hit there, `inner_compile` is not called, and there would be no
    report. Inductor's cache of graphs, which saves most of the time, stays on. `region`: the name that the
    user gave the compiled code (torch 2.13 and later).
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx as inductor_compile_fx

    named = {} if region is None else {"compile_region_name": region}
    with functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False):
        return inductor_compile_fx(
            gm, example_inputs, inner_compile=inner_compile, config_patches=config_patches, **named
        )


def compiles_for_a_file() -> bool:
    """Whether what is compiled now will be written to a file (`aot_compile`, AOTInductor): torch then needs
    its own function and its own cache."""
    from torch._functorch import config as functorch_config
    from torch._inductor.virtualized import V

    options = ("bundled_autograd_cache", "force_autograd_cache")
    return V.aot_compilation or any(getattr(functorch_config, name, False) for name in options)


def compiles_here() -> bool:
    """Whether Inductor runs its passes in this process, and not in one that knows no custom passes."""
    from torch._inductor import compile_fx

    return compile_fx.fx_compile_mode is compile_fx.FxCompileMode.NORMAL


def takes_is_inference(graph_pass: Callable[..., None]) -> bool:
    """Whether Inductor calls this custom pass with `is_inference=`, which torch 2.11 does not."""
    aware = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
    return aware is not None and isinstance(graph_pass, aware)


def compile_fx_inner(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Inductor's passes and code generation for one graph, or the result from Inductor's cache."""
    from torch._inductor.compile_fx import compile_fx_inner as inductor_compile_fx_inner

    return inductor_compile_fx_inner(gm, example_inputs, **kwargs)


def run_post_grad_passes(gm: fx.GraphModule, example_inputs: Sequence[Any], is_inference: bool) -> None:
    """Run Inductor's post-grad passes, with custom passes, in place, as `compile_fx_inner` does."""
    from torch._inductor.compile_fx import _recursive_post_grad_passes, view_to_reshape
    from torch._inductor.virtualized import V

    view_to_reshape(gm)
    with V.set_fake_mode(propagate_fakes(gm, example_inputs)):
        _recursive_post_grad_passes(gm, is_inference=is_inference)


def propagate_fakes(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    """Set the `meta["val"]` of every node, which nodes of Inductor may lack. Returns the fake mode."""
    from torch._inductor.compile_fx import fake_tensor_prop

    with torch.no_grad():
        return fake_tensor_prop(gm, example_inputs)


def forget_sparse(graph: fx.Graph) -> None:
    """Let Inductor compute the `meta["val"]` of nodes with sparse results again, without the old values.

    After the passes, Inductor updates changed nodes and their users. If a new value equals the old one in all
    else, it compares storages, also of the users' results, and fails: sparse tensors have no storage. Hence
    such nodes and their inputs are replaced by new nodes, with values that differ earlier.
    """
    for node in list(graph.nodes):
        if any(val.is_sparse for val in _tensors(node)):
            for each in (*node.all_input_nodes, node):
                if each.op == "call_function" and _tensors(each):
                    _renew(each)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [val for val in pytree.tree_leaves(node.meta.get("val")) if isinstance(val, torch.Tensor)]


def _renew(node: fx.Node) -> None:
    with node.graph.inserting_before(node):
        new = node.graph.node_copy(node, lambda n: n)
    new.meta["val"] = pytree.tree_map_only(torch.Tensor, _unlike, node.meta["val"])
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _unlike(val: torch.Tensor) -> torch.Tensor:
    """A fake tensor like `val`, but strided if `val` is sparse, else with another storage offset."""
    with getattr(val, "fake_mode", nullcontext()):
        if val.is_sparse:
            return torch.empty(val.shape, dtype=val.dtype, device=val.device)
        shape, strides = (2, *val.shape), (val.storage_offset() + 1, *val.stride())
        return torch.empty_strided(shape, strides, dtype=val.dtype, device=val.device)[1]


def generate_calls(names: Mapping[str, Callable[[str], str]]) -> None:
    """Inductor's Python code calls `names[op](device type)` in place of these ops, past the dispatcher."""
    from torch._inductor.codegen.custom_extern_kernel_codegen import (
        CUSTOM_EXTERN_KERNEL_CODEGEN,
        CustomCodegen,
    )

    def lines(name_of: Callable[[str], str]) -> Callable[[Any, Callable[[str], None]], None]:
        def write(node: Any, writeline: Callable[[str], None]) -> None:
            device = node.get_device()
            args = ", ".join([*node.codegen_args(), *node.codegen_kwargs()])
            name = name_of("" if device is None else device.type)
            writeline(f"{node.get_name()} = {name}({args})")

        return write

    for op, name_of in names.items():
        CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.{op}.default"] = CustomCodegen(lines(name_of))


@contextmanager
def compiling_variants() -> Iterator[None]:
    """Inside, one function is compiled with several backends: nothing comes from AOTAutograd's cache, whose
    key might not know all of their passes; splits that are read from tensors stay in the graph."""
    from torch._dynamo import config as dynamo_config
    from torch._functorch import config as functorch_config

    with (
        functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
        dynamo_config.patch(capture_scalar_outputs=True, recompile_limit=64),
    ):
        yield


def order_calls(namespace: str) -> None:
    """From now on (call it once) Inductor keeps the order of the ops of a namespace, and of collectives, as
    the graph has it. By itself it does so for collectives alone: custom ops that do not depend on each other
    are ordered by the memory that they need, which differs between ranks where their graphs do."""
    from torch._inductor import comms, ir
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.utils import contains_collective

    stock = comms.decide_global_ordering_of_comms

    def is_ours(node: Any) -> bool:
        inner: Any = getattr(node, "node", None)
        overload = inner.op_overload if type(inner) is ir.FallbackKernel else None
        return isinstance(overload, torch._ops.OpOverload) and overload.namespace == namespace

    def decide(nodes: list[Any], *rest: Any) -> list[Any]:
        if not any(map(is_ours, nodes)):
            return stock(nodes, *rest)
        ordered = [node for node in nodes if is_ours(node) or contains_collective(node)]
        for before, node in itertools.pairwise(ordered):
            changed = next(iter(node.get_buffer_names()))
            for name in before.get_buffer_names():
                node.add_fake_dep(WeakDep(name, mutating_buf=changed, is_fake=True))
        return nodes

    comms.decide_global_ordering_of_comms = decide


def inductor_options() -> dict[str, Any]:
    """Names and present values of Inductor's settings."""
    from torch._inductor import config

    return config.get_config_copy()


def inductor_option(name: str) -> Any:
    """The present value of one of Inductor's settings."""
    from torch._inductor import config

    return getattr(config, name)


def inductor_mode_options() -> dict[str, dict[str, Any]]:
    """The settings that each `mode` of torch.compile stands for."""
    from torch._inductor import list_mode_options

    return list_mode_options()


def graph_break_counts() -> Counter[str]:
    """How often dynamo broke a graph or did not compile a function, by reason."""
    from torch._dynamo.utils import counters

    return Counter(counters["graph_break"]) + Counter(counters["unimplemented"])


def structured_log_on() -> bool:
    """Whether torch writes its structured log (`TORCH_TRACE=folder`), which tlparse shows."""
    from torch._logging import _internal

    # The handler always exists; without a folder it writes nothing.
    return getattr(_internal.LOG_TRACE_HANDLER, "root_dir", None) is not None


def log_artifact(name: str, encoding: str, payload: str) -> None:
    """Add a file `name` to the structured log of the present compilation. `encoding`: string or json."""
    from torch._logging import trace_structured

    trace_structured("artifact", lambda: {"name": name, "encoding": encoding}, payload_fn=lambda: payload)


def size_hint(size: int | torch.SymInt, unbacked: int) -> int:
    """The value of `size` while tracing, with `unbacked` for symbols without a value."""
    if isinstance(size, int):
        return size
    expr = size.node.shape_env.replace(size.node.expr).xreplace(symbol_hints(size))
    return int(expr.xreplace(dict.fromkeys(expr.free_symbols, sympy.Integer(unbacked))))


# --- Dense ops ----------------------------------------------------------------------------------------


def group_size(group: str | ProcessGroup) -> int:
    """Number of ranks of a process group, given by itself or by its name."""
    return resolve_group(group).size()


def scaled_mm(
    x: torch.Tensor, w: torch.Tensor, scale_x: torch.Tensor, scale_w: torch.Tensor, dtype: torch.dtype | None
) -> torch.Tensor:
    """`(x * scale_x) @ (w * scale_w)` of low-precision floats."""
    return torch._scaled_mm(x, w, scale_x, scale_w, out_dtype=dtype)


def has_grouped_mm() -> bool:
    """Whether this release of torch has `torch._grouped_mm`."""
    return hasattr(torch, "_grouped_mm")


def grouped_mm(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """`x: [R, K]` times `w: [E, K, N]`. Expert e has the rows from `ends[e - 1]` to `ends[e]` (int32)."""
    result: torch.Tensor = torch._grouped_mm(x, w, offs=ends)
    return result


# --- Process groups -----------------------------------------------------------------------------------


def resolve_group(group: str | ProcessGroup) -> ProcessGroup:
    """The group of this name, or the group itself. RuntimeError if there is no such group."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return group if isinstance(group, ProcessGroup) else _resolve_process_group(group)  # type: ignore[arg-type]


def group_store(group: ProcessGroup) -> Store:
    """The key-value store that all ranks of `group` share, with a prefix of its own."""
    from torch.distributed.distributed_c10d import _get_process_group_store

    return _get_process_group_store(group)


def group_timeout_s(group: ProcessGroup, device: torch.device) -> float | None:
    """After how many seconds collectives of the group on such devices fail; None where that is not known."""
    try:
        seconds: float = group._get_backend(device).options._timeout.total_seconds()
    except (RuntimeError, AttributeError):
        return None
    return seconds


def fake_store() -> Store:
    """A store that holds no values, for groups of the backend `fake`, whose collectives move no data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # also registers the backend

    return FakeStore()


def register_autograd(
    library: torch.library.Library,
    overload: torch._ops.OpOverload,
    backward: Callable[..., Any],
    setup_context: Callable[..., None],
    devices: Mapping[str, Callable[..., Any]],
) -> None:
    """As `torch.library.register_autograd`, but calls without gradients call the function of their device. A
    second pass through the dispatcher takes as long as all other work before a launch.
    """
    from torch._library.autograd import Info, make_autograd_impl

    record = make_autograd_impl(overload, Info(backward, setup_context))
    keys, below = torch._C.DispatchKey, torch._C._after_autograd_keyset
    direct = {
        torch._C.DispatchKeySet(getattr(keys, device)).raw_repr(): run for device, run in devices.items()
    }

    def autograd(keyset: Any, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            run = direct.get((keyset & below).raw_repr())
            if run is not None:
                return run(*args)
        return record(keyset, *args)

    library.impl(overload._schema.name.partition("::")[2], autograd, "Autograd", with_keyset=True)


def nobody_intervenes() -> bool:
    """Whether an op that is called now reaches its device's implementation with the arguments as they are,
    if these are plain tensors: no mode, no transform, and nobody traces or compiles."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def current_raw_stream(device: int) -> int:
    """The address of the device's current CUDA stream, without a stream object, which takes microseconds."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def empty_strided(device_type: str) -> Callable[..., torch.Tensor]:
    """`empty(shape, strides, dtype)` on the current device of a type, as Inductor's code calls it: without
    the dispatcher's questions about factories."""
    from torch._C._dynamo import guards

    found: Callable[..., torch.Tensor] = getattr(guards, f"_empty_strided_{device_type}")
    return found


def settings_of(module: Any, *names: str) -> Callable[[], tuple[Any, ...]]:
    """What users have set of these settings of a module of torch's kind. To ask for their values takes a
    microsecond each."""
    entries = [module._config[name] for name in names]
    nested = hasattr(entries[0].user_override, "_value")  # as `autofuse.config` has it, torch 2.13 and later
    value = attrgetter("user_override._value" if nested else "user_override")
    return lambda: tuple(map(value, entries))


def symmetric_memory(device_type: str) -> str | None:
    """Name of the allocator of torch's symmetric memory on devices of this type; None if there is none."""
    try:
        from torch.distributed import _symmetric_memory

        return _symmetric_memory.get_backend(torch.device(device_type)) or None
    except (ImportError, RuntimeError, AttributeError):
        return None


def symmetric_empty(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that the other ranks of a group can map, `size` elements of `dtype`."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.empty(size, dtype=dtype, device=device)


def symmetric_views(own: torch.Tensor, group: ProcessGroup) -> list[torch.Tensor]:
    """`own`, from `symmetric_empty`, as mapped from every rank of the group. All ranks call it together.

    torch takes GPUs of one index for one GPU, unless it is told not to: where each process sees but one of
    them, all are number 0. Whether they are one GPU is for the caller to ask.
    """
    from torch.distributed import _symmetric_memory

    with _environment("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1"):
        handle = _symmetric_memory.rendezvous(own, group.group_name)
    views = [handle.get_buffer(r, own.shape, own.dtype) for r in range(group.size())]
    views[group.rank()] = own
    return views


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def gpu_sleep(cycles: int) -> None:
    """The current stream of the current GPU has nothing but this to do."""
    torch.cuda._sleep(cycles)


def symmetric_barrier(own: torch.Tensor, group: ProcessGroup) -> None:
    """Of the streams of all ranks of the group; `own`: from `symmetric_empty`."""
    from torch.distributed import _symmetric_memory

    _symmetric_memory.rendezvous(own, group.group_name).barrier()


def symmetric_all_reduce(x: torch.Tensor, group_name: str, once: bool) -> torch.Tensor:
    """Sum over the ranks of `x`, which is symmetric memory.

    `once`: every rank reads all of x from all ranks, and the sum is in ordinary memory. Else: every rank
    reduces its share and stores the sum in the x of all ranks.
    """
    if once:
        return torch.ops.symm_mem.one_shot_all_reduce(x, "sum", group_name)
    return torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", group_name)


def symmetric_all_reduce_into(out: torch.Tensor, x: torch.Tensor, group_name: str) -> None:
    """The sum over the ranks of `x`, which is symmetric memory, in two steps; `out` is ordinary memory."""
    torch.ops.symm_mem.two_shot_all_reduce_out(x, "sum", group_name, out)


def enable_symmetric_memory(group: ProcessGroup) -> None:
    """Let Inductor's async tensor parallelism use symmetric memory for the group; newer torch always does."""
    from torch.distributed import _symmetric_memory

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        _symmetric_memory.enable_symm_mem_for_group(group.group_name)


def async_tp_matmul_reduce_scatter(x: torch.Tensor, w: torch.Tensor, group_name: str) -> torch.Tensor:
    """This rank's rows of the sum over the ranks of `x @ w`, by torch's async tensor parallelism."""
    result: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, group_name)
    return result


def async_tp_all_gather_matmul(
    part: torch.Tensor, w: Sequence[torch.Tensor], group_name: str
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The gathered rows X, and X times every weight, by torch's async tensor parallelism."""
    gathered, outputs = torch.ops.symm_mem.fused_all_gather_matmul(part, list(w), 0, group_name)
    return gathered, list(outputs)


def symmetric_all_to_all_2d(
    rows: torch.Tensor, out: torch.Tensor, splits: torch.Tensor, found: torch.Tensor, group_name: str
) -> None:
    """Send rows, by rank and expert with counts `splits`, to the ranks of their experts, by expert and rank.

    All tensors are symmetric memory of NVSHMEM. The call writes counts and offsets to `found`: [2, W * E].
    """
    torch.ops.symm_mem.all_to_all_vdev_2d(rows, out, splits, found, group_name)


def symmetric_all_to_all_2d_back(
    rows: torch.Tensor, out: torch.Tensor, given: torch.Tensor, found: torch.Tensor, group_name: str
) -> None:
    """The reverse. `given`: [2, W * E], counts and offsets of `rows`, by expert and rank."""
    torch.ops.symm_mem.all_to_all_vdev_2d_offset(rows, out, given, found, group_name)


def finished_work(result: Any) -> Any:
    """A finished `c10d::Work`, as operators return it. Its future holds `result`, which DDP reads."""
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future).boxed()


def auto_functionalized() -> Any:
    """The higher-order op that calls an op on copies of the arguments that it changes, and returns them."""
    return torch.ops.higher_order.auto_functionalized_v2


# --- Passes -------------------------------------------------------------------------------------------


def group_world(group: str | ProcessGroup) -> int | None:
    """Number of ranks of the group; None if there is no group of that name."""
    try:
        return group_size(group)
    except (RuntimeError, ValueError, KeyError):
        return None


def group_ranks() -> dict[str, list[int]]:
    """The ranks of every group of this process, by the group's name."""
    from torch.distributed.distributed_c10d import _world

    ranks = {str(name): sorted(_world.pg_group_ranks[group]) for group, name in _world.pg_names.items()}
    return dict(sorted(ranks.items()))


def traced_group(value: object) -> ProcessGroup | None:
    """The process group that a value in the metadata of a graph is, or stands for as a fake object."""
    value = getattr(value, "real_obj", value)
    return value if isinstance(value, ProcessGroup) else None


def group_spans_hosts(group: str | ProcessGroup) -> bool:
    """Whether the group has ranks on several hosts, by the environment that the launcher sets.

    All ranks must agree at compile time, without communication. If the launcher does not set
    `LOCAL_WORLD_SIZE`, the first call finds out, and runs the plain collectives.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if local <= 0:
        return False
    ranks = torch.distributed.get_process_group_ranks(resolve_group(group))
    return len({rank // local for rank in ranks}) > 1


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype, `bf16`."""
    from torch.fx.graph import dtype_abbrs

    return dtype_abbrs.get(dtype, str(dtype).removeprefix("torch."))


def symbol_hints(size: torch.SymInt) -> dict[sympy.Symbol, Any]:
    """The values of the symbols of a graph while it was traced."""
    shape_env = size.node.shape_env
    # torch 2.11 calls it var_to_val, later releases backed_var_to_val.
    name = "backed_var_to_val" if hasattr(shape_env, "backed_var_to_val") else "var_to_val"
    return dict(getattr(shape_env, name))


def floor_divide(a: sympy.Expr, b: int) -> sympy.Expr:
    """`a // b` in the form that sizes of a graph have."""
    from torch.utils._sympy.functions import FloorDiv

    return FloorDiv(a, sympy.Integer(b))


def floor_division(size: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr] | None:
    """`(a, b)` of a size `a // b`."""
    from torch.utils._sympy.functions import FloorDiv

    return (size.args[0], size.args[1]) if isinstance(size, FloorDiv) else None


def symbol_ranges(size: torch.SymInt) -> dict[sympy.Symbol, tuple[int, int]]:
    """The least and the largest value of every integer symbol of a graph. An unknown end is a number that no
    size reaches."""
    ranges = {}
    for symbol, known in size.node.shape_env.var_to_range.items():
        if not known.is_bool and symbol.is_integer:
            ends = (max(known.lower, 0), min(known.upper, sys.maxsize))
            ranges[symbol] = int(ends[0]), int(ends[1])
    return ranges


def first_shapes_are_static() -> AbstractContextManager[None]:
    """Inside, dynamo does not use sizes of earlier calls, and does not record sizes of calls."""
    from torch._dynamo import config

    return config.patch(automatic_dynamic_shapes=False)


# --- Tensors whose parts lie on several ranks -----------------------------------------------------------


def sharded_vector(
    mine: torch.Tensor, parts: Sequence[tuple[int, int]], length: int, group: ProcessGroup
) -> Any:
    """A vector of which rank r holds elements `[start, stop)` = `parts[r]`, this rank `mine`; as
    torch.distributed.checkpoint takes it. No communication."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

    device = mine.device.type if mine.device.type == "cpu" else f"{mine.device.type}:{mine.device.index}"
    shards = {
        rank: ShardMetadata([start], [stop - start], f"rank:{rank}/{device}")
        for rank, (start, stop) in enumerate(parts)
        if start < stop
    }
    properties = TensorProperties(dtype=mine.dtype)
    whole = ShardedTensorMetadata(list(shards.values()), torch.Size([length]), properties)
    own = [Shard(mine, shards[group.rank()])] if group.rank() in shards else []
    return ShardedTensor._init_from_local_shards_and_global_metadata(own, whole, process_group=group)


def local_shards(value: Any) -> list[torch.Tensor] | None:
    """What this rank holds of a `sharded_vector`; None for anything else."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    return [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else None


def after_backward(function: Callable[[], None]) -> None:
    """Calls `function` when the backward that now runs has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(function)

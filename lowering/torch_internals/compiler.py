"""Dynamo, AOTAutograd and Inductor: compilations, passes, generated code, settings and logs."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._inductor import custom_graph_pass
from torch.utils import _pytree as pytree

from .decompositions import decompositions_before


def compile_fx(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inner_compile: Callable[..., Any],
    config_patches: dict[str, Any],
    region: str | None = None,
) -> Callable[..., Any]:
    """AOTAutograd and Inductor on a dynamo graph. `inner_compile` gets each forward and backward graph.

    AOTAutograd's own cache is off: after a hit there, `inner_compile` is not called, and there would be no
    report. Inductor's cache of graphs, which saves most of the time, stays on. Some ops are not decomposed
    yet (`decompositions.py`). `region`: the name that the user gave the compiled code (torch 2.13 and later).
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx as inductor_compile_fx

    named: dict[str, Any] = {} if region is None else {"compile_region_name": region}
    named["decompositions"] = decompositions_before(config_patches)
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


def compiled_frame() -> tuple[int, int] | None:
    """The frame that dynamo compiles now, and how often it has compiled it before; None outside of dynamo."""
    known = torch._guards.CompileContext.current_compile_id()
    if known is None or known.frame_id is None or known.frame_compile_id is None:
        return None
    return known.frame_id, known.frame_compile_id


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


def donated_inputs() -> str:
    """The numbers of the inputs that the code of the current backward graph may overwrite. There are none if
    the first backward keeps the graph (`retain_graph`). AOTAutograd's cache key has them, that of Inductor's
    cache has not."""
    from torch._inductor.utils import get_donated_idxs

    return repr(get_donated_idxs())


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
    """From now on (call it once) Inductor keeps the ops of a namespace, and their order in the graph.

    Inductor erases a custom op whose results are not read. A rank that gets no rows does not read them, and
    would skip an op that its peers call. Inductor keeps the order of collectives only. It orders all other
    kernels by the memory that they need, and this order differs between ranks with different sizes. So
    `order_calls` keeps two more orders:

    - The order of the ops and collectives. Ranks with different orders would wait for each other forever.
    - The order of the ops and the long kernels: those of libraries and templates, such as matmuls. If one
      rank multiplies before an op and another rank behind it, each rank waits for the matmul of the other.
    """
    from torch._inductor import comms, ir
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.utils import contains_collective

    stock = comms.decide_global_ordering_of_comms

    def is_ours(node: Any) -> bool:
        inner: Any = getattr(node, "node", None)
        overload = inner.op_overload if type(inner) is ir.FallbackKernel else None
        return isinstance(overload, torch._ops.OpOverload) and overload.namespace == namespace

    def is_long(node: Any) -> bool:
        no_kernel = ir.MultiOutput, ir.NopKernel, ir._CollectiveKernel
        return node.is_template() or (node.is_extern() and not isinstance(node.node, no_kernel))

    def put_behind(node: Any, before: Any) -> None:
        changed = next(iter(node.get_buffer_names()))
        for name in before.get_buffer_names():
            node.add_fake_dep(WeakDep(name, mutating_buf=changed, is_fake=True))

    def decide(nodes: list[Any], *rest: Any) -> list[Any]:
        if not any(map(is_ours, nodes)):
            return stock(nodes, *rest)
        for node in filter(is_ours, nodes):
            node.has_side_effects = lambda: True  # so that it is not erased
        for before, node in itertools.pairwise(n for n in nodes if is_ours(n) or contains_collective(n)):
            put_behind(node, before)
        latest: Any = None
        since: list[Any] = []  # long kernels behind the latest of the ops
        for node in nodes:
            if is_ours(node):
                for before in since:
                    put_behind(node, before)
                latest, since = node, []
            elif is_long(node):
                if latest is not None:
                    put_behind(node, latest)
                since.append(node)
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


def first_shapes_are_static() -> AbstractContextManager[None]:
    """Inside, dynamo does not use sizes of earlier calls, and does not record sizes of calls."""
    from torch._dynamo import config

    return config.patch(automatic_dynamic_shapes=False)


def saved_for_backward(graph: fx.Graph) -> list[fx.Node] | None:
    """The values that a forward graph returns for its backward, inputs aside; None where nothing tells which
    of its results these are."""
    context = torch._guards.TracingContext.try_get()
    about = None if context is None else context.fw_metadata
    if about is None:
        return None
    (output,) = graph.find_nodes(op="output")
    returned = output.args[0][about.num_forward :]
    computed = (node for node in returned if isinstance(node, fx.Node) and node.op != "placeholder")
    return list(dict.fromkeys(computed))

"""`torch.compile(model, backend="autofuse")`: Inductor, with our pass before its post-grad passes, and a pass
that marks joint graphs."""

import copy
import functools
import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from autofuse import lowering, passes
from autofuse.agreeing import Agreed, outcomes_of_frame
from autofuse.declarations import Given, given
from autofuse.lowering import torch_internals, watcher
from autofuse.lowering.direct import generate_direct_calls
from autofuse.lowering.torch_internals import CustomGraphPass, takes_is_inference
from autofuse.options import measure_if_tuned, own_options, resolve
from autofuse.options import settings as settings_of
from autofuse.passes.reasons import Reason
from autofuse.passes.report import GraphReport, Report, Schedule, listening, publish
from autofuse.passes.schedules.schedule import SPLIT, Basis

log = logging.getLogger(__name__)

_numbers = itertools.count()


def autofuse(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend. `options` takes the names in `autofuse.config` and every option of Inductor.

    Raises ValueError for an unknown mode or option, and for a bad value.
    """
    return compile_fused(gm, example_inputs, *resolve(mode, options))


def compile_fused(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: passes.Settings,
    patches: Mapping[str, Any],
    region: str | None = None,
) -> Callable[..., Any]:
    """Compiles a graph of dynamo with Inductor and our passes. `patches`: changes to Inductor's
    configuration. `region`: the user's name of what is compiled."""
    measure_if_tuned(patches)
    inputs = given(gm, example_inputs)
    basis = Basis(inputs.of_graph, compared=may_rest(settings, inputs))
    fusion, patches = fusion_pass(next(_numbers), settings, patches, basis)
    as_written = fx.GraphModule(gm, copy.deepcopy(gm.graph)) if basis.compared else None
    groups: set[str] = set()

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        groups.update(group_names(gm))
        about = functools.partial(passes.circumstances, inputs=inputs.of_graph)
        with fusion.compiling(graph_kind(kwargs), passes.unless_faulty(about, gm.graph)):
            compiled = torch_internals.compile_fx_inner(gm, example_inputs, **kwargs)
            wanted = as_written is not None or listening() or log.isEnabledFor(logging.INFO)
            if wanted and not fusion.ran:
                _run_pass_on_a_copy(gm, example_inputs, kwargs)
        return compiled

    compiled = torch_internals.compile_fx(gm, example_inputs, compile_graph, patches, region)
    if basis.proofs and as_written is not None:
        compiled = Agreed(compiled, as_written, tuple(basis.proofs), inputs, outcomes_of_frame())
    return _checked(compiled, groups)


def may_rest(settings: passes.Settings, inputs: Given) -> bool:
    """Whether the schedule of a graph may rest on proofs that its ranks must compare before it runs."""
    return settings.schedule == SPLIT or any(known.declared and known.over for known in inputs.inputs)


def _run_pass_on_a_copy(gm: fx.GraphModule, example_inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Inductor's cache returned the compiled graph, and no pass ran. The cache key covers all inputs of the
    pass, so that the pass on a copy of the graph reports what the compiled graph does, and finds the proofs
    that its schedule rests on. The copy shares its attributes: real tensors cannot be copied here."""
    if not torch_internals.compiles_here():
        log.warning("Inductor compiles in another process (TORCHINDUCTOR_FX_COMPILE_MODE): nothing is fused")
        return
    same = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    torch_internals.run_post_grad_passes(same, example_inputs, kwargs.get("is_inference", False))


def _checked(compiled: Callable[..., Any], groups: set[str]) -> Callable[..., Any]:
    """Raises before a call if a fused op of one of these groups has failed: where Inductor replays a CUDA
    graph, nobody else would."""
    failed = watcher.failed

    def checked(*args: Any) -> Any:
        if failed and not failed.isdisjoint(groups):
            watcher.check(groups)
        return compiled(*args)

    return checked


def group_names(gm: fx.GraphModule) -> set[str]:
    """Names of process groups among the arguments of the calls of a graph and its subgraphs."""
    named = {
        arg
        for module in gm.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
        if node.op == "call_function"
        for arg in (*node.args, *node.kwargs.values())
        if isinstance(arg, str)
    }
    return {name for name in named if torch_internals.group_world(name) is not None}


def fusion_pass(
    number: int,
    settings: passes.Settings,
    patches: Mapping[str, Any] = MappingProxyType({}),
    basis: Basis | None = None,
) -> tuple["FusionPass", dict[str, Any]]:
    """The pass for graph `number`, and `patches` with the changes to Inductor's configuration that install
    it. `basis`: what its schedule may rest on.

    Where something may be fused, the pass takes over Inductor's padding of matmuls."""
    before, joint, padding = "post_grad_custom_pre_pass", "joint_custom_post_pass", torch_internals.PADDING
    takes_over = settings.policy != "never"
    pads = takes_over and bool(patches.get(padding, torch_internals.inductor_option(padding)))
    fusion = FusionPass(settings, _configured(before, patches), number, basis, pads)
    unpadded = {padding: False} if takes_over else {}
    joint_pass = JointPass(_configured(joint, patches), fusion)
    return fusion, {**patches, **unpadded, before: fusion, joint: joint_pass}


def _configured(name: str, patches: Mapping[str, Any]) -> tuple[Callable[..., None], ...]:
    """The passes that the user has configured. `None` in `patches` means no pass."""
    found = patches[name] if name in patches else torch_internals.inductor_option(name)
    others = found if isinstance(found, (list, tuple)) else (found,) if found else ()
    # One fusion is enough: another of ours would report what this one has kept a second time. The
    # configuration has one while a graph is compiled, in torch before 2.13 on all threads.
    return tuple(other for other in others if not isinstance(other, (CustomPass, FusionPass, JointPass)))


def graph_kind(kwargs: Mapping[str, Any]) -> str:
    """The kind of a graph: `forward`, `backward` or `inference`, by the keywords of Inductor's
    compilation."""
    if kwargs.get("is_backward"):
        return "backward"
    return "inference" if kwargs.get("is_inference") else "forward"


class JointPass(CustomGraphPass):
    """Runs the user's passes of joint graphs, chooses the schedule, and marks indices that are permutations
    and tensors that are blank for backward graphs."""

    def __init__(self, others: tuple[Callable[..., None], ...], fusion: "FusionPass") -> None:
        self.others = others
        self.fusion = fusion

    def __call__(self, graph: fx.Graph) -> None:
        for other in self.others:
            other(graph)
        fusion = self.fusion
        fusion.schedules += passes.reschedule_or_not(graph, fusion.settings, fusion.basis)
        passes.unless_faulty(passes.mark_inputs, graph)

    def uuid(self) -> str | None:
        """Neither marks nor schedules are part of it: the marks are part of the identity of the graph's
        `FusionPass`, and the graphs that Inductor knows by their code are those of the schedule."""
        return _identity((_sources_digest(),), self.others)


class FusionPass(CustomGraphPass):
    """Runs the passes that the user configured, then the fusion, and publishes the report. `pads`: matmuls
    that the fusion has left are padded as Inductor would have padded them."""

    def __init__(
        self,
        settings: passes.Settings,
        others: tuple[Callable[..., None], ...],
        number: int,
        basis: Basis | None = None,
        pads: bool = False,
    ) -> None:
        self.settings = settings
        self.pads = pads
        self.basis = basis or Basis()
        self.others = others
        self.number = number
        self.kind = "inference"
        self.circumstances: str | None = ""
        self.ran = False
        self.schedules: list[Schedule] = []

    @contextmanager
    def compiling(self, kind: str, circumstances: str | None = "") -> Iterator[None]:
        """Graphs that pass inside are of this kind; `ran` tells whether there were any. `circumstances`
        become part of the identity, for a compilation that may be cached; None: it may not."""
        self.kind, self.circumstances, self.ran = kind, circumstances, False
        yield

    def __call__(self, graph: fx.Graph) -> None:
        self.ran = True
        for other in self.others:
            if takes_is_inference(other):
                other(graph, is_inference=self.kind == "inference")
            else:
                other(graph)
        told = () if self.kind == "backward" else tuple(self.schedules)
        _fuse(graph, self.settings, self.kind, self.number, told, self.basis)
        passes.unless_faulty(torch_internals.decompose_later, graph)
        if self.pads:
            passes.unless_faulty(torch_internals.pad_matmuls, graph)

    def uuid(self) -> str | None:
        """Covers everything that a rewrite depends on, equal on all ranks, and the inputs that a backward
        graph may overwrite. None (never cached) if a pass of the user has no identity, or if the
        circumstances are not known."""
        if self.circumstances is None:
            return None
        donated = torch_internals.donated_inputs() if self.kind == "backward" else ""
        settings = _settings_text(self.settings)
        depends_on = _sources_digest(), settings, self.circumstances, str(self.pads), donated
        return _identity(depends_on, self.others)


class CustomPass(CustomGraphPass):
    """The fusion as one custom pass, for compilers that run Inductor with a list of passes of their own."""

    def __init__(self, settings: passes.Settings) -> None:
        self.settings = settings

    def __call__(self, graph: fx.Graph) -> None:
        pads = torch_internals.inductor_option(torch_internals.PADDING)
        if pads and self.settings.policy != "never" and torch.cuda.is_available():
            _warn_of_padding()
        backward = any(n.op == "placeholder" and n.name.startswith("tangents") for n in graph.nodes)
        _fuse(graph, self.settings, "backward" if backward else "forward", next(_numbers))

    def uuid(self) -> str:
        """Covers the groups of this process, whatever the graph: nobody says which graph it is asked for."""
        settings = _settings_text(self.settings)
        return _digest((_sources_digest(), settings, passes.circumstances_of_any_graph()))


@functools.cache
def _warn_of_padding() -> None:
    log.warning(
        "autofuse.custom_pass runs after Inductor has padded matmuls. Each rank pads where it measures that "
        "to be faster, so the graphs of two ranks may differ, and these ranks then wait for each other in "
        "fused ops: set torch._inductor.config.shape_padding = False"
    )


def custom_pass(**options: Any) -> CustomPass:
    """The fusion as a pass for `torch._inductor.config.post_grad_custom_pre_pass`, `..._post_pass`, or a list
    of passes of another compiler. It takes the options of autofuse; see the guide.

    Raises ValueError for an unknown option and for a bad value. `schedule` and `prefer` are none of them:
    such a pass sees no joint graphs.
    """
    if not options.keys().isdisjoint(("schedule", "prefer")):
        raise ValueError("custom_pass: a schedule is chosen in joint graphs, which this pass does not see")
    return CustomPass(replace(settings_of(**own_options(options)), lines=False))


def _fuse(
    graph: fx.Graph,
    settings: passes.Settings,
    kind: str,
    number: int,
    told: tuple[Schedule, ...] = (),
    basis: Basis | None = None,
) -> None:
    generate_direct_calls()
    report = passes.fuse_or_keep(graph, settings, kind, f"{kind} {number}", basis)
    saved = passes.unless_faulty(passes.saved_bytes, graph) if kind == "forward" else None
    report = replace(report, schedules=told, saved_bytes=saved)
    if any(site.fused for site in report.sites):
        torch_internals.forget_sparse(graph)
    record(report)


def _identity(depends_on: tuple[str, ...], others: Sequence[Callable[..., None]]) -> str | None:
    uuids = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in others]
    return None if None in uuids else _digest((*depends_on, uuids))


def _digest(depends_on: tuple[object, ...]) -> str:
    return hashlib.sha256(repr(depends_on).encode()).hexdigest()


def record(graph: GraphReport) -> None:
    """Sends a report to all listeners, logs a line, and warns if the CPU kernels are missing."""
    publish(graph)
    if torch_internals.structured_log_on():
        torch_internals.log_artifact("autofuse_before", "string", str(graph.before))
        torch_internals.log_artifact("autofuse_after", "string", str(graph.after))
        torch_internals.log_artifact("autofuse_decisions", "string", str(Report([graph])))
    fused = sum(site.fused for site in graph.sites)
    log.info("%s: %d fused, %d kept", graph.name, fused, len(graph.sites) - fused)
    if any(site.reason is Reason.NO_NATIVE_KERNELS for site in graph.sites):
        log.warning("The native kernels are missing: %s", Reason.NO_NATIVE_KERNELS.advice)


def _settings_text(settings: passes.Settings) -> str:
    # The order in which a set is printed differs between processes.
    patterns = None if settings.patterns is None else sorted(settings.patterns)
    tables = [table.digest for table in settings.tables]
    known = settings.policy, patterns, settings.order, tables, settings.schedule
    return repr((*known, settings.lines))


@functools.cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for room in (passes, lowering):
        for path in sorted(Path(next(iter(room.__path__))).rglob("*.*")):
            if path.suffix in (".py", ".json"):  # constants decide, too
                digest.update(path.read_bytes())
    return digest.hexdigest()

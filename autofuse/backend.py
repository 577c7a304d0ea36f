"""`torch.compile(model, backend="autofuse")`: Inductor, with our pass before its post-grad passes, and a pass
that marks joint graphs."""

import copy
import functools
import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import fx

from autofuse import lowering, passes
from autofuse.lowering import torch_internals, watcher
from autofuse.lowering.torch_internals import CustomGraphPass, takes_is_inference
from autofuse.options import resolve
from autofuse.passes.report import GraphReport, Reason, Report, listening, publish

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
    fusion, patches = fusion_pass(next(_numbers), mode, options)
    groups: set[str] = set()

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        groups.update(group_names(gm.graph))
        with fusion.compiling(graph_kind(kwargs), passes.circumstances(gm.graph)):
            compiled = torch_internals.compile_fx_inner(gm, example_inputs, **kwargs)
            if not fusion.ran and (listening() or log.isEnabledFor(logging.INFO)):
                # Inductor's cache returned the compiled graph, and no pass ran. The cache key covers all
                # inputs of the pass, so that the pass on a copy of the graph reports what the compiled graph
                # does. The copy shares its attributes: real tensors cannot be copied here.
                same = fx.GraphModule(gm, copy.deepcopy(gm.graph))
                torch_internals.run_post_grad_passes(same, example_inputs, kwargs.get("is_inference", False))
        return compiled

    return _checked(torch_internals.compile_fx(gm, example_inputs, compile_graph, patches), groups)


def _checked(compiled: Callable[..., Any], groups: set[str]) -> Callable[..., Any]:
    """Raises before a call if a fused op of one of these groups has failed: where Inductor replays a CUDA
    graph, nobody else would."""
    failed = watcher.failed

    def checked(*args: Any) -> Any:
        if failed and not failed.isdisjoint(groups):
            watcher.check(groups)
        return compiled(*args)

    return checked


def group_names(graph: fx.Graph) -> set[str]:
    """Names of process groups among the arguments of a graph's calls."""
    named = {
        arg
        for node in graph.nodes
        if node.op == "call_function"
        for arg in (*node.args, *node.kwargs.values())
        if isinstance(arg, str)
    }
    return {name for name in named if torch_internals.group_world(name) is not None}


def fusion_pass(
    number: int, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> tuple["FusionPass", dict[str, Any]]:
    """The pass for graph `number`, and the changes to Inductor's configuration that install it."""
    settings, patches = resolve(mode, options)
    before, joint = "post_grad_custom_pre_pass", "joint_custom_post_pass"
    fusion = FusionPass(settings, _configured(before, patches), number)
    return fusion, {**patches, before: fusion, joint: MarkingPass(_configured(joint, patches))}


def _configured(name: str, patches: Mapping[str, Any]) -> tuple[Callable[..., None], ...]:
    """The passes that the user has configured."""
    found = patches.get(name, None) or torch_internals.inductor_option(name)
    return tuple(found) if isinstance(found, (list, tuple)) else (found,) if found else ()


def graph_kind(kwargs: Mapping[str, Any]) -> str:
    """The kind of a graph: `forward`, `backward` or `inference`, by the keywords of Inductor's
    compilation."""
    if kwargs.get("is_backward"):
        return "backward"
    return "inference" if kwargs.get("is_inference") else "forward"


class MarkingPass(CustomGraphPass):
    """Runs the user's passes of joint graphs, then marks indices that are permutations for backward
    graphs."""

    def __init__(self, others: tuple[Callable[..., None], ...]) -> None:
        self.others = others

    def __call__(self, graph: fx.Graph) -> None:
        for other in self.others:
            other(graph)
        passes.mark_permutations(graph)

    def uuid(self) -> str | None:
        """Empty: the marks are part of the identity of the graph's `FusionPass`."""
        return _identity((_sources_digest(),), self.others)


class FusionPass(CustomGraphPass):
    """Runs the passes that the user configured, then the fusion, and publishes the report."""

    def __init__(
        self, settings: passes.Settings, others: tuple[Callable[..., None], ...], number: int
    ) -> None:
        self.settings = settings
        self.others = others
        self.number = number
        self.kind = "inference"
        self.circumstances = ""
        self.ran = False

    @contextmanager
    def compiling(self, kind: str, circumstances: str = "") -> Iterator[None]:
        """Graphs that pass inside are of this kind; `ran` tells whether there were any. `circumstances`
        become part of the identity, for a compilation that may be cached."""
        self.kind, self.circumstances, self.ran = kind, circumstances, False
        yield

    def __call__(self, graph: fx.Graph) -> None:
        self.ran = True
        for other in self.others:
            if takes_is_inference(other):
                other(graph, is_inference=self.kind == "inference")
            else:
                other(graph)
        report = passes.fuse(graph, self.settings, self.kind, f"{self.kind} {self.number}")
        if any(site.fused for site in report.sites):
            torch_internals.forget_sparse(graph)
        record(report)

    def uuid(self) -> str | None:
        """Covers everything that a rewrite depends on, equal on all ranks. None (never cached) if a pass of
        the user has no identity."""
        return _identity((_sources_digest(), _settings_text(self.settings), self.circumstances), self.others)


def _identity(depends_on: tuple[str, ...], others: Sequence[Callable[..., None]]) -> str | None:
    uuids = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in others]
    return None if None in uuids else hashlib.sha256(repr((*depends_on, uuids)).encode()).hexdigest()


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
    return repr((settings.policy, patterns, settings.order, tables, settings.captured))


@functools.cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for room in (passes, lowering):
        for path in sorted(Path(next(iter(room.__path__))).rglob("*.*")):
            if path.suffix in (".py", ".json"):  # constants decide, too
                digest.update(path.read_bytes())
    return digest.hexdigest()

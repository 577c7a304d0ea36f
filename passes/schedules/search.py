"""The search of the schedule `auto`: the legal schedules are priced, and the cheapest is taken.

`SplitSearch` prices a stream: the values between the all_reduces of a group in a joint graph, which `split`
changes as a whole. If the stream is not split, `Search` prices the tail of every fused reduction by itself.

All ranks decide alike. The decision depends on the graph round the collective, the ranges of sizes (not the
sizes seen while tracing), the tables that all ranks have, and the values that users declare on all ranks.
"""

from __future__ import annotations

import torch

from autofuse.lowering.torch_internals import group_world
from autofuse.passes.choice.choose import Symbols
from autofuse.passes.choice.device_table import table_for
from autofuse.passes.choice.gpu_pricing import GpuPricing
from autofuse.passes.choice.scheduled import CpuPricing, Pricing, cheapest
from autofuse.passes.choice.ways import predictor_on
from autofuse.passes.graph.anchors import Anchor
from autofuse.passes.legality import check_place
from autofuse.passes.report import Considered
from autofuse.passes.settings import Settings
from autofuse.passes.tails import Candidate, Decision

from .clusters import cluster_of, clusters_of
from .schedule import EVERY, OWNER, SPLIT, UNCHANGED, Prover
from .split import Stream

_NONE_SAVES = "no other is predicted to save more than {:.0%}"
_NO_TAIL_SAVES = "no tail is predicted to save more than {:.0%}"
_SPLIT_SAVES_LESS = "it is not predicted to save more than {:.0%}"
_EACH = "each reduction decides for itself: see below"
_UNKNOWN = "no times are predicted of these sizes and dtypes"

_OPS = ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul")
"""The ops of a stream, unchanged or split."""


class SplitSearch:
    """Decides whether the stream of a group is split."""

    def __init__(self, settings: Settings, symbols: Symbols) -> None:
        self._settings, self._symbols = settings, symbols

    def why_not(self, anchor: Anchor) -> str:
        """Why the stream behind an all_reduce is not priced; empty if it is."""
        device, patterns = anchor.node.meta["val"].device, self._settings.patterns
        left_out = [] if patterns is None else [op for op in _OPS if op not in patterns]
        if left_out:
            return f"patterns={sorted(patterns or ())} leaves out {left_out[0]}"
        world = group_world(anchor.known_group) if anchor.known_group is not None else None
        assert world is not None
        reject = check_place(anchor, world)
        if reject is not None:
            return reject.detail
        return "" if pricing_on(device, self._settings) else f"no times are predicted on {device.type}"

    def __call__(self, stream: Stream) -> tuple[Considered, ...]:
        first = next(iter(stream.reductions))
        pricing = pricing_on(first.meta["val"].device, self._settings)
        assert pricing is not None
        legal = [UNCHANGED, EVERY, *([] if self._settings.order == "ring" else [OWNER]), SPLIT]
        taken, times = cheapest(clusters_of(stream, self._settings), legal, pricing, self._symbols)
        why = _why(pricing, taken, priced=any(times.values()))
        return tuple(Considered(n, us, n == taken, why.get(n, "")) for n, us in times.items())


class Search:
    """Decides for each tail of a graph whether the op takes it, and in which form."""

    def __init__(self, prover: Prover, settings: Settings, symbols: Symbols) -> None:
        self._prover, self._settings, self._symbols = prover, settings, symbols

    def __call__(self, candidate: Candidate) -> Decision:
        refused = {OWNER: self._prover.why_not(candidate)}
        if candidate.whole:
            refused[SPLIT] = self._prover.not_split(candidate)
        legal = [UNCHANGED, EVERY, *([] if refused[OWNER] else [OWNER])]
        cluster = cluster_of(candidate)
        pricing = pricing_on(candidate.reduced.meta["val"].device, self._settings)
        if cluster is None or pricing is None:
            why = f"no times are predicted of what reduces {candidate.given['product'].split(';')[0]!r}"
            stands = [Considered(UNCHANGED, None, True, why)]
            return Decision(False, "", (*stands, *(Considered(n, None) for n in legal[1:]), *_no(refused)))
        taken, times = cheapest([cluster], legal, pricing, self._symbols)
        tails = pricing.margins(EVERY, stands=True).somewhere
        why = _NONE_SAVES.format(tails) if taken == UNCHANGED else ""
        found = [Considered(n, us, n == taken, why if n == taken else "") for n, us in times.items()]
        proof = self._prover.prove(candidate) if taken == OWNER else ""
        return Decision(taken != UNCHANGED, proof, (*found, *_no(refused)))


def pricing_on(device: torch.device, settings: Settings) -> Pricing | None:
    """How schedules are priced on a device; None if they are not."""
    if device.type == "cpu":
        return CpuPricing.here(table_for(settings.tables, device))
    predictor = predictor_on(device)
    return None if predictor is None else GpuPricing(predictor)


def _why(pricing: Pricing, taken: str, priced: bool) -> dict[str, str]:
    """Why a stream has the schedule that it has, and is not split."""
    if taken == SPLIT:
        return {}
    if not priced:
        return {taken: _UNKNOWN}
    tails = pricing.margins(EVERY, stands=True).somewhere
    split = pricing.margins(SPLIT, stands=taken == UNCHANGED).somewhere
    if taken == UNCHANGED and tails == split:
        return {taken: _NONE_SAVES.format(tails)}
    why = {taken: _NO_TAIL_SAVES.format(tails) if taken == UNCHANGED else _EACH}
    return why | ({SPLIT: _SPLIT_SAVES_LESS.format(split)} if split else {})


def _no(refused: dict[str, str]) -> list[Considered]:
    return [Considered(name, None, False, why) for name, why in refused.items() if why]

"""Where ranks disagree: which parameter it is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from autofuse.lowering import agreement
from autofuse.lowering.torch_internals import resolve_group
from autofuse.optim.batch import Batch


class Told(NamedTuple):
    """What each rank sends to the others for a comparison.

    problem: why this rank cannot continue, or empty. The lists have one entry for each parameter. lines: what
    it is; rates: what its next update depends on; codes: the code of its gradient.
    """

    problem: str
    lines: list[str]
    rates: list[str]
    codes: list[int]


def raise_difference(
    op: str, mine: Told, names: Sequence[str], group_name: str, error: Exception | None
) -> None:
    """Raises ValueError on all ranks if one has a problem or they differ, else `error`, if there is one. All
    ranks call it together."""
    group = resolve_group(group_name)
    told: list[Any] = [None] * group.size()
    dist.all_gather_object(told, mine, group)
    for rank, theirs in enumerate(told):
        if theirs.problem:
            raise ValueError(f"{op}: rank {rank}: {theirs.problem}; no parameter has changed") from error
    for entry in ("lines", "rates"):
        of_ranks = [getattr(theirs, entry) for theirs in told]
        for rank, theirs in enumerate(of_ranks):
            for i in range(max(len(of_ranks[0]), len(theirs))):
                pair = [lines[i] if i < len(lines) else "no parameter" for lines in (of_ranks[0], theirs)]
                if pair[0] != pair[1]:
                    what = "the ranks have other " + ("parameters" if entry == "lines" else "rates")
                    raise ValueError(
                        f"{op}: {what}: rank 0 has {pair[0]}, rank {rank} has {pair[1]}; no parameter has "
                        "changed"
                    ) from error
    problem = agreement.problem(op, [agreement.told(0, 0, theirs.codes) for theirs in told], names)
    if problem:
        raise ValueError(problem) from error
    if error is not None:
        raise error


def lines_of(batches: Sequence[Batch], sharing: str) -> list[str]:
    """Every parameter. sharing: what all of them share."""
    return [
        f"{name} {list(p.shape)} {p.dtype} on {p.device.type} ({batch.rule}, {sharing})"
        for batch in batches
        for p, name in zip(batch.params, batch.names, strict=True)
    ]


def rates_of(batches: Sequence[Batch], param_groups: Sequence[dict[str, Any]]) -> list[str]:
    """Every parameter, with what its next update depends on."""
    options = [{k: v for k, v in o.items() if k not in ("params", "param_names")} for o in param_groups]
    return [
        f"{name} with {options[group]} at update {t + 1}"
        for batch in batches
        for name, group, t in zip(batch.names, batch.groups, batch.steps, strict=True)
    ]

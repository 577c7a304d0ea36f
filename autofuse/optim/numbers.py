"""The numbers of the parameters of a batch for their next update, from the options of their param groups."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autofuse.lowering.update_rules import NUMBERS, SEAL, Term, numbers_at
from autofuse.optim.batch import Batch

Row: TypeAlias = Sequence[float]
"""The numbers of a parameter (`lowering.update_rules`)."""
Options: TypeAlias = dict[str, Any]


TermsOf: TypeAlias = Callable[[Options], Sequence[Term]]
"""Of the parameters with these options."""


def check_rules(batch: Batch, param_groups: Sequence[Options], rule_of: Callable[[Options], str]) -> None:
    """Raises ValueError where options ask for another rule than that of the batch."""
    for group in dict.fromkeys(batch.groups):
        if (rule := rule_of(param_groups[group])) != batch.rule:
            name = batch.names[batch.groups.index(group)]
            raise ValueError(
                f"the group of {name} was made for the rule {batch.rule}; its options now ask for {rule}: "
                "make a new optimizer for that"
            )


def rows_on_host(batch: Batch, param_groups: Sequence[Options], terms_of: TermsOf) -> list[Row]:
    """One for each parameter; equal ones are one object."""
    kinds = [*zip(batch.groups, batch.steps, strict=True)]
    known = {
        (group, t): _row(batch, param_groups[group], group, t + 1, terms_of)
        for group, t in dict.fromkeys(kinds)
    }
    return [known[kind] for kind in kinds]


def _row(batch: Batch, options: Options, group: int, t: int, terms_of: TermsOf) -> Row:
    try:
        return numbers_at(terms_of(options), t, float(options["lr"]))
    except Exception as error:
        name = batch.names[batch.groups.index(group)]
        raise ValueError(f"the options of the group of {name}: {error}") from error


def numbers_of(rows: Sequence[Row], seal: float) -> Tensor:
    """The rows as the op takes them. seal: a number that must be equal on all ranks."""
    kinds = {id(row): row for row in rows}
    values = array("d", chain.from_iterable(kinds.values()))
    values[SEAL::NUMBERS] = array("d", [seal] * len(kinds))
    numbers = torch.frombuffer(values, dtype=torch.float64)
    if len(kinds) == 1:
        return numbers.expand(len(rows), NUMBERS)
    order = {key: i for i, key in enumerate(kinds)}
    return numbers.view(-1, NUMBERS)[torch.tensor([order[id(row)] for row in rows], device="cpu")]

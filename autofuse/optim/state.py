"""State of sliced optimizers as dicts: of this rank, of all ranks, and for torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from autofuse.lowering.reference.layout import all_to_all
from autofuse.lowering.torch_internals import local_shards, resolve_group, sharded_vector
from autofuse.optim.batch import MASTER, Batch

SPAN = "span"
"""The elements of the parameter, in row-major order, that the state of a rank is for: start, stop, number."""


class State(torch.optim.Optimizer):
    """The state of an optimizer. It is made when it is asked for, or at the first step."""

    _batches: list[Batch]
    _group_name: str
    _names: dict[Tensor, str]
    _place: Callable[[], None]

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, for the same rank of a group of the same size. No communication.

        For each parameter `step` and flat tensors of the elements that this rank owns, which `span` tells.
        The tensors are views: clone what is to stay as it is.
        """
        self._place()
        found = {}
        for batch, i, number in self._numbered():
            start, stop = batch.part(i)
            span = (start, stop, batch.params[i].numel())
            found[number] = {"step": torch.tensor(float(batch.steps[i])), SPAN: span, **batch.slices(i)}
        return {"state": found, "param_groups": self._packed_groups()}

    def full_state_dict(self) -> dict[str, Any]:
        """The state of all ranks: what torch's optimizer of this name has as its state_dict, in float32.

        All ranks call it together, and all get it. torch's optimizer loads it, and so does one of a group of
        any size. Master weights are a state of their own, which torch ignores.
        """
        self._place()
        whole = {id(batch): self._gathered(batch) for batch in self._batches}
        found: dict[int, dict[str, Any]] = {}
        for batch, i, number in self._numbered():
            if batch.steps[i]:
                first, end = batch.buckets.offsets[i : i + 2]
                shape = batch.params[i].shape
                states = {key: flat[first:end].view(shape) for key, flat in whole[id(batch)].items()}
                found[number] = {"step": torch.tensor(float(batch.steps[i])), **states}
        return {"state": found, "param_groups": self._packed_groups()}

    def sharded_state_dict(self) -> dict[str, Any]:
        """The state for `torch.distributed.checkpoint`: what a rank owns of each parameter is a shard.

        `dcp.save` writes it. To load, in a group of any size: `dcp.load` into a new sharded_state_dict, then
        `load_state_dict` of that. No communication. Parameters are told apart by their names, if the
        optimizer was given named parameters, else by their numbers.
        """
        self._place()
        group = resolve_group(self._group_name)
        states: dict[str, Any] = {}
        for batch, i, number in self._numbered():
            parts = [batch.buckets.part(r, i) for r in range(group.size())]
            found: dict[str, Any] = {"step": torch.tensor(float(batch.steps[i]))}
            for key, flat in batch.slices(i).items():
                found[key] = sharded_vector(flat, parts, batch.params[i].numel(), group)
            states[self._key(number, batch.params[i])] = found
        # A tuple is one entry of the checkpoint. Ranks without shards of some tensor would look for a list in
        # vain, since torch takes the checkpoint for one of its version 2.3 then.
        return {"state": states, "param_groups": tuple(self._packed_groups())}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what any of the three methods gives, and the state_dict of torch's optimizer of this name.

        Load the model first: without master weights in the state they become the parameters. ValueError for a
        local state of other ranks or of a group of another size.
        """
        given = dict(state_dict["state"])
        super().load_state_dict({"state": {}, "param_groups": list(state_dict["param_groups"])})
        self._place()
        for batch, i, number in self._numbered():
            name = self._names[batch.params[i]]
            keys = (number, str(number), self._key(number, batch.params[i]))
            saved: dict[str, Any] = next((given[key] for key in keys if key in given), {})
            moved = any(isinstance(value, Tensor) for key, value in saved.items() if key in batch.keys)
            batch.steps[i] = int(saved["step"]) if "step" in saved else int(moved)
            for key, mine in batch.slices(i).items():
                value = saved.get(key)
                if value is not None:
                    self._load(mine, value, batch, i, saved.get(SPAN), name)
                elif key == MASTER:
                    batch.renew_master(i)
                else:
                    mine.zero_()

    def _load(self, mine: Tensor, value: Any, batch: Batch, i: int, span: Any, name: str) -> None:
        numel, (start, stop) = batch.params[i].numel(), batch.part(i)
        shards = local_shards(value)
        if shards is not None:
            for shard in shards:
                mine.copy_(shard)
        elif span is not None and tuple(span) != (start, stop, numel):
            raise ValueError(
                f"the state of {name} is of its elements {span[0]} to {span[1]} of {span[2]}, this rank owns "
                f"{start} to {stop} of {numel}: it is the state_dict of another rank or of a group of "
                "another size; use full_state_dict or sharded_state_dict"
            )
        elif span is None and value.numel() != numel:
            raise ValueError(f"the state of {name} has {value.numel()} elements, the parameter {numel}")
        else:
            mine.copy_(value.reshape(-1)[slice(start, stop) if span is None else slice(None)])

    def _gathered(self, batch: Batch) -> dict[str, Tensor]:
        world = batch.buckets.world
        sizes = [batch.buckets.owned(r) for r in range(world)]
        return {
            key: all_to_all(state.repeat(world), sizes, [len(state)] * world, self._group_name)
            for key, state in zip(batch.keys, batch.states, strict=True)
        }

    def _numbered(self) -> Iterator[tuple[Batch, int, int]]:
        """Every parameter: its batch, its place there, and its number among all."""
        params = (p for options in self.param_groups for p in options["params"])
        numbers = {p: number for number, p in enumerate(params)}
        for batch in self._batches:
            for i, param in enumerate(batch.params):
                yield batch, i, numbers[param]

    def _key(self, number: int, param: Tensor) -> str:
        named = "param_names" in self.param_groups[0]
        return self._names[param] if named else str(number)

    def _packed_groups(self) -> list[dict[str, Any]]:
        packed, first = [], 0
        for options in self.param_groups:
            count = len(options["params"])
            packed.append({**options, "params": list(range(first, first + count))})
            first += count
        return packed

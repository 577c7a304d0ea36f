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

IMPLEMENTATIONS = frozenset({"foreach", "fused", "differentiable"})
"""Arguments of torch's optimizers that ours have not."""

NEWER = {"maximize": False, "decoupled_weight_decay": False}
"""Arguments that states of torch before 1.11 and 2.7 do not have, with the values that torch adds."""

COPIED = (
    "grad_norm", "_group_name", "_average", "_max_norm", "_error_if_nonfinite", "_master_weights",
    "_in_backward", "_capturable", "_batches", "_met", "_waiting", "_known", "_every", "_names",
)  # fmt: skip
"""What a copy of an optimizer has besides what torch copies."""


class State(torch.optim.Optimizer):
    """The state of an optimizer. It is made when it is asked for, or at the first step."""

    _batches: list[Batch]
    _group_name: str
    _master_weights: bool
    _names: dict[Tensor, str]
    _ready: Callable[..., None]
    _meet: Callable[[bool], None]
    _begin: Callable[[], None]
    _rule: Callable[[dict[str, Any]], str]

    def __getstate__(self) -> dict[str, Any]:
        """Without hooks, as torch's."""
        return super().__getstate__() | {key: getattr(self, key) for key in COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_batches" in state:  # torch calls this for a part of the state, too
            self._begin()

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, for the same rank of a group of the same size. No communication.

        For each parameter `step` and flat tensors of the elements that this rank owns, which `span` tells.
        The tensors are views: clone what is to stay as it is.
        """
        self._ready()
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        found, steps = {}, self._steps()
        for batch, i, number in self._numbered():
            start, stop = batch.part(i)
            span = (start, stop, batch.params[i].numel())
            found[number] = {"step": torch.tensor(float(steps[batch][i])), SPAN: span, **batch.slices(i)}
        state_dict: dict[str, Any] = {"state": found, "param_groups": self._packed_groups()}
        for behind in self._optimizer_state_dict_post_hooks.values():
            changed = behind(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def full_state_dict(self) -> dict[str, Any]:
        """The state of all ranks: what torch's optimizer of this name has as its state_dict, in float32.

        All ranks call it together, and all get it. torch's optimizer loads it, and so does one of a group of
        any size. Master weights are a state of their own, which torch ignores. ValueError on all ranks if
        they have other parameters.
        """
        self._ready()
        self._meet(True)
        whole = {id(batch): self._gathered(batch) for batch in self._batches}
        found: dict[int, dict[str, Any]] = {}
        steps = self._steps()
        for batch, i, number in self._numbered():
            if steps[batch][i]:
                first, end = batch.buckets.offsets[i : i + 2]
                shape = batch.params[i].shape
                states = {key: flat[first:end].view(shape) for key, flat in whole[id(batch)].items()}
                found[number] = {"step": torch.tensor(float(steps[batch][i])), **states}
        return {"state": found, "param_groups": self._packed_groups()}

    def sharded_state_dict(self) -> dict[str, Any]:
        """The state for `torch.distributed.checkpoint`: what a rank owns of each parameter is a shard.

        `dcp.save` writes it. To load, in a group of any size: `dcp.load` into a new sharded_state_dict, then
        `load_state_dict` of that. No communication. Parameters are told apart by their names, if the
        optimizer was given named parameters, else by their numbers.
        """
        self._ready()
        group, steps = resolve_group(self._group_name), self._steps()
        states: dict[str, Any] = {}
        for batch, i, number in self._numbered():
            parts = [batch.buckets.part(r, i) for r in range(group.size())]
            found: dict[str, Any] = {"step": torch.tensor(float(steps[batch][i]))}
            for key, flat in batch.slices(i).items():
                numel = batch.params[i].numel()
                found[key] = sharded_vector(flat, parts, numel, group) if numel else flat
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
        params = [p for options in self.param_groups for p in options["params"]]
        states: dict[Tensor, dict[str, Any]] = {}
        for number, param in enumerate(params):
            keys = (number, str(number), self._key(number, param))
            states[param] = next((given[key] for key in keys if key in given), {})
        # Frozen ones keep their states for the time when they are frozen no longer.
        self._ready({param for param, state in states.items() if state})
        found = [(batch, i, states[batch.params[i]]) for batch, i, _ in self._numbered()]
        for each in found:
            self._check(*each)
        newer = {name: value for name, value in NEWER.items() if name in self.defaults}
        packed = [{**newer, **options} for options in state_dict["param_groups"]]
        for options in packed:
            if missing := sorted(self.defaults.keys() - options.keys() - IMPLEMENTATIONS):
                raise ValueError(
                    f"the state has no {', '.join(missing)}: it is that of another optimizer than "
                    f"{type(self).__name__}"
                )
        super().load_state_dict({"state": {}, "param_groups": packed})
        for batch in self._batches:
            rules = {self._rule(self.param_groups[group]) for group in batch.groups}
            if rules != {batch.rule}:
                if len(rules) > 1:
                    raise ValueError(
                        f"the state asks for rules {sorted(rules)}, this optimizer for {batch.rule}"
                    )
                batch.follow(rules.pop(), self._master_weights)
        steps = self._steps()
        for batch, i, saved in found:
            moved = any(isinstance(value, Tensor) for key, value in saved.items() if key in batch.keys)
            steps[batch][i] = int(saved["step"]) if "step" in saved else int(moved)
            for key, mine in batch.slices(i).items():
                value = saved.get(key)
                if value is not None:
                    self._load(mine, value, batch, i, saved.get(SPAN))
                elif key == MASTER:
                    batch.renew_master(i)
                else:
                    mine.zero_()
        for batch, counts in steps.items():
            batch.steps = counts

    def _steps(self) -> dict[Batch, list[int]]:
        """How often each parameter has been updated."""
        return {batch: batch.steps for batch in self._batches}

    def _check(self, batch: Batch, i: int, saved: dict[str, Any]) -> None:
        """Raises ValueError for a state that is not that of the parameter on this rank."""
        name, numel, (start, stop) = batch.names[i], batch.params[i].numel(), batch.part(i)
        span = saved.get(SPAN)
        if span is not None and tuple(span) != (start, stop, numel):
            raise ValueError(
                f"the state of {name} is of its elements {span[0]} to {span[1]} of {span[2]}, this rank owns "
                f"{start} to {stop} of {numel}: it is the state_dict of another rank or of a group of "
                "another size, or parameters were frozen or added then and are not now; use full_state_dict "
                "or sharded_state_dict"
            )
        for key, value in saved.items():
            if not isinstance(value, Tensor) or key == "step":
                continue
            shards, expected = local_shards(value), numel if span is None else stop - start
            if shards is not None:
                value, expected = torch.cat([*shards, torch.empty(0)]), stop - start
            if value.numel() != expected:
                raise ValueError(f"the state of {name} has {value.numel()} elements, expected {expected}")

    def _load(self, mine: Tensor, value: Any, batch: Batch, i: int, span: Any) -> None:
        shards = local_shards(value)
        if shards is not None:
            for shard in shards:
                mine.copy_(shard)
        else:
            mine.copy_(value.reshape(-1)[slice(*batch.part(i)) if span is None else slice(None)])

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

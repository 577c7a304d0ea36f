"""Fused kernels of one device run one after another, whatever their groups; streams and events are faked."""

from types import SimpleNamespace
from unittest.mock import patch

import torch

from autofuse.lowering import torch_internals
from autofuse.lowering.gpu.memory import chain


class Stream:
    def __init__(self, name: str, done: list[str]) -> None:
        self.name, self._done = name, done

    def wait_event(self, event: "Event") -> None:
        self._done.append(f"{self.name} waits for {event.recorded}")


class Event:
    recorded, cuda_event = "", 5

    def record(self, stream: Stream) -> None:
        self.recorded = stream.name


def test_groups_of_one_device_share_a_chain() -> None:
    done: list[str] = []
    streams = {name: Stream(name, done) for name in "ab"}
    now = SimpleNamespace(name="a")
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    with (
        patch.object(torch.cuda, "Event", Event),
        patch.object(torch.cuda, "current_stream", lambda _: streams[now.name]),
        patch.object(torch_internals, "current_raw_stream", lambda _: ord(now.name)),
    ):
        chain.chain_of.cache_clear()
        try:
            of_tp, of_dp, elsewhere = (chain.chain_of(device) for device in (first, first, second))
            for each, name in ((of_tp, "a"), (of_dp, "a"), (of_dp, "b"), (elsewhere, "a"), (of_tp, "a")):
                now.name = name
                each.enter()
                each.leave()
        finally:
            chain.chain_of.cache_clear()
    assert done == ["b waits for a", "a waits for b"]

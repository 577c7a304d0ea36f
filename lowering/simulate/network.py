"""Links between GPUs: routes by topology, and a queue at every link."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

from .events import Engine
from .machine import Network, Shape

Link = tuple[Hashable, ...]
"""(kind, number of the rank that it belongs to, ...)."""


def route(network: Network, world: int, source: int, dest: int) -> list[Link]:
    """The links from `source` to `dest`, in order. ValueError if a torus or hosts do not fit the world."""
    if network.shape is Shape.FULL:
        return [("out", source), ("in", dest)]
    if network.shape is Shape.RING:
        right = (dest - source) % world
        turn, hops = (1, right) if right <= world - right else (-1, world - right)
        return [("link", (source + turn * i) % world, turn) for i in range(hops)]
    width = network.width
    if width < 1 or world % width:
        raise ValueError(f"{network.shape.value}: {world} ranks are not a multiple of the width {width}")
    if network.shape is Shape.HOSTS:
        if source // width == dest // width:
            return [("out", source), ("in", dest)]
        return [("nic out", source), ("nic in", dest)]
    links: list[Link] = []
    row, column = divmod(source, width)
    for turn in _turns(column, dest % width, width):
        links.append(("x", row * width + column, turn))
        column = (column + turn) % width
    height = world // width
    for turn in _turns(row, dest // width, height):
        links.append(("y", row * width + column, turn))
        row = (row + turn) % height
    return links


def _turns(start: int, stop: int, length: int) -> list[int]:
    """The steps of the shorter way round a ring."""
    forth = (stop - start) % length
    return [1] * forth if forth <= length - forth else [-1] * (length - forth)


def period(network: Network, world: int) -> int:
    """The smallest shift of ranks that maps the network onto itself."""
    return 1 if network.shape in (Shape.FULL, Shape.RING) else min(world, network.width)


class Links:
    """Carries messages. A message holds a link for its bytes over the link's rate, first come, first served;
    its head moves on to the next link meanwhile. The ports in of FULL and HOSTS have no latency of their own.

    `ranks`: how many ranks are simulated; the others behave as these do, shifted (`executor`).
    """

    def __init__(self, engine: Engine, network: Network, world: int, ranks: int) -> None:
        self.engine, self.network, self.world, self.ranks = engine, network, world, ranks
        self.carried: dict[Link, float] = {}
        """Bytes over every link."""
        self._free: dict[Link, float] = {}
        self._routes: dict[tuple[int, int], list[Link]] = {}

    def send(
        self,
        source: int,
        dest: int,
        nbytes: float,
        arrived: Callable[[], None],
        left: Callable[[], None] | None = None,
    ) -> None:
        """Move bytes; `left` is called when the last of them is on the first link."""
        links = self._routes.get((source, dest))
        if links is None:
            links = [
                (kind, int(rank) % self.ranks, *rest)  # type: ignore[call-overload]
                for kind, rank, *rest in route(self.network, self.world, source, dest)
            ]
            self._routes[source, dest] = links
        self._hop(links, 0, nbytes, 0.0, arrived, left)

    def latency(self, source: int, dest: int) -> float:
        """Microseconds of an empty message."""
        return sum(self._rate(link)[1] for link in route(self.network, self.world, source, dest))

    def _hop(
        self,
        links: list[Link],
        index: int,
        nbytes: float,
        until: float,
        arrived: Callable[[], None],
        left: Callable[[], None] | None,
    ) -> None:
        """The head of a message is at link `index`; its tail left the link before at `until`."""
        link, now = links[index], self.engine.now
        rate, latency = self._rate(link)
        start = max(now, self._free.get(link, 0.0))
        end = max(start + nbytes / rate, until)
        self._free[link] = start + nbytes / rate
        self.carried[link] = self.carried.get(link, 0.0) + nbytes
        if left is not None:
            self.engine.at(end, left)
        if index + 1 == len(links):
            self.engine.at(end + latency, arrived)
        else:
            self.engine.at(
                start + latency, partial(self._hop, links, index + 1, nbytes, end + latency, arrived, None)
            )

    def _rate(self, link: Link) -> tuple[float, float]:
        network, kind = self.network, link[0]
        if kind == "nic out":
            return network.nic_rate, network.nic_latency
        if kind == "nic in":
            return network.nic_rate, 0.0
        return network.rate, 0.0 if kind == "in" else network.latency

"""Random calls for a given time, with stragglers and ranks that are killed; prints what was counted.

    python -m tests.soak.run --seconds 600 --seed 1 --worlds 2 3 4

An episode has processes and groups of its own. In every second episode a rank is killed at a random moment;
the others must raise an error that names it. The exit status is 1 if a result was wrong, an episode did not
end in time, or a survivor named nobody. The same seed draws the same calls.
"""

import random
import sys
import tempfile
import time
from argparse import ArgumentParser
from contextlib import closing

from tests.ranks import RankPool, RanksFailed
from tests.soak import on_cpus
from tests.soak.counts import Counts

EPISODE_S = 10.0
SETTLE_S = 60.0
"""How long an episode may take to start and end beside its calls."""


def run_episode(number: int, seed: int, seconds: float, worlds: list[int]) -> Counts:
    """One episode, in processes of its own."""
    draw = random.Random(f"{seed}/{number}")
    world = draw.choice(worlds)
    kills = number % 2 == 1
    victim = draw.randrange(world) if kills else -1
    after = draw.random() * seconds
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        hang = 0
        with closing(RankPool(world)) as pool:
            arguments = draw.randrange(1 << 30), seconds, victim, after, directory
            try:
                pool.run(on_cpus.episode, *arguments, timeout=seconds + SETTLE_S)
            except RanksFailed as failure:
                text = str(failure)
                hang = int("was still running" in text)
                if hang or not kills:
                    print(f"episode {number} (world {world}, victim {victim}):\n{text}", file=sys.stderr)
        counts = Counts.read(directory)
    counts.hangs, counts.killed = hang, int(kills)
    return counts


def main() -> int:
    """The command."""
    parser = ArgumentParser(description=__doc__, prog="python -m tests.soak.run")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3, 4])
    options = parser.parse_args()
    total, number, end = Counts(), 0, time.monotonic() + options.seconds
    while (left := end - time.monotonic()) > 0:
        total += run_episode(number, options.seed, min(EPISODE_S, left), options.worlds)
        number += 1
        print(f"{number} episodes: {total}", flush=True)
    return int(total.failed)


if __name__ == "__main__":
    sys.exit(main())

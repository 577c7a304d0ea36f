"""Random calls for a given time, with stragglers and ranks that are killed; prints what was counted.

    python -m tests.soak.run --seconds 600 --seed 1 --worlds 2 3 4          CPU ranks
    python -m tests.soak.run --seconds 300 --device cuda --worlds 2        GPUs, beside NCCL on other streams

An episode has processes and groups of its own. In every second episode a rank is killed at a random moment;
the others must raise an error that names it. The exit status is 1 if a result was wrong, an episode did not
end in time or raised without a reason, or a survivor named nobody. The same seed draws the same calls.
"""

import os
import random
import sys
import tempfile
import time
from argparse import ArgumentParser
from contextlib import closing
from unittest.mock import patch

from tests.ranks import RankPool, RanksFailed
from tests.soak import on_cpus, on_gpus
from tests.soak.counts import Counts

EPISODE_S = {"cpu": 10.0, "cuda": 60.0}
SETTLE_S = {"cpu": 60.0, "cuda": 300.0}
"""How long an episode may take to start, to compile its kernels, and to end."""


def run_episode(
    number: int, seed: int, seconds: float, worlds: list[int], device: str = "cpu", kills: bool = True
) -> Counts:
    """One episode, in processes of its own."""
    draw = random.Random(f"{seed}/{number}")
    world = draw.choice(worlds)
    kills = kills and number % 2 == 1
    victim = draw.randrange(world) if kills else -1
    after = draw.random() * seconds
    # With one queue of the hardware for all streams, more of them wait for each other.
    queues = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if number % 3 == 2 else {}
    with tempfile.TemporaryDirectory(prefix="soak-") as directory, patch.dict(os.environ, queues):
        hang = raised = 0
        with closing(RankPool(world) if device == "cpu" else RankPool(world, None, "nccl")) as pool:
            episode = on_cpus.episode if device == "cpu" else on_gpus.episode
            arguments = draw.randrange(1 << 30), seconds, victim, after, directory
            try:
                pool.run(episode, *arguments, timeout=seconds + SETTLE_S[device])
            except RanksFailed as failure:
                text = str(failure)
                hang, raised = int("was still running" in text), int(not kills)
                if hang or raised:
                    print(f"episode {number} (world {world}, victim {victim}):\n{text}", file=sys.stderr)
        counts = Counts.read(directory)
    counts.hangs, counts.raised, counts.killed = hang, raised, int(kills)
    return counts


def main() -> int:
    """The command."""
    parser = ArgumentParser(description=__doc__, prog="python -m tests.soak.run")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--device", choices=EPISODE_S, default="cpu")
    parser.add_argument("--no-kills", action="store_true", help="no rank is killed")
    options = parser.parse_args()
    total, number, end = Counts(), 0, time.monotonic() + options.seconds
    while (left := end - time.monotonic()) > 0:
        seconds = min(EPISODE_S[options.device], left)
        total += run_episode(
            number, options.seed, seconds, options.worlds, options.device, not options.no_kills
        )
        number += 1
        print(f"{number} episodes: {total}", flush=True)
    return int(total.failed)


if __name__ == "__main__":
    sys.exit(main())

"""The kernels under compute-sanitizer: memory that is not theirs, and races in shared memory."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ranks import ONE_GPU

from .sanitized import PARTS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
TOLD = ROOT / "native_kernels/cuda/include/progress.cuh"
"""`poke`, `poke_at` and `peek` are here: words of shared memory by which threads tell each other something
without a barrier. One thread stores a word while others read it over and over; each access is of 4 bytes."""

ACCESS = re.compile(r"(?:Read|Write) access at \S+ in (\S+)")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("options", "most"),
    [
        # torch asks the driver for what this one may not have or permit.
        pytest.param(["--tool=memcheck", "--report-api-errors=no"], 0, id="memcheck"),
        # matmul_words does not end in minutes there: all threads of its blocks read one word over and over.
        pytest.param(["--tool=racecheck", "--kernel-name-exclude", "kns=matmul_words"], 1, id="racecheck"),
    ],
)
def test_nothing_is_found(options: list[str], most: int, part: str) -> None:
    if torch.cuda.device_count() < (1 if ONE_GPU else 2):
        pytest.skip("needs 2 GPUs")
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer, which CUDA toolkits have")
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--module"]
    done = subprocess.run(
        [
            sanitizer,
            *options,
            "--target-processes=all",
            "--error-exitcode=9",
            sys.executable,
            *ranks,
            "tests.gpu.sanitized",
            part,
            str(most),
        ],
        capture_output=True,
        text=True,
        timeout=580,
        cwd=ROOT,
        # Else tensors share blocks, and what is beyond one is another's.
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    assert "whole" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]  # it came to the end
    found = set(ACCESS.findall(done.stdout)) - told()
    assert not found, f"races at {', '.join(sorted(found))}"
    assert done.returncode == 0 or ACCESS.search(done.stdout), done.stdout[-4000:] + done.stderr[-4000:]


def told() -> set[str]:
    """The places of `poke` and `peek`, as the sanitizer prints them."""
    lines = enumerate(TOLD.read_text().splitlines(), 1)
    told = (".volatile.shared", "st.relaxed.cluster.shared::cluster")
    return {f"{TOLD.name}:{number}" for number, line in lines if any(each in line for each in told)}

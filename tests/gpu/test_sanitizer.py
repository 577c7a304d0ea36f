"""The kernels under compute-sanitizer: memory that is not theirs, and races in shared memory."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .sanitized import PARTS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("options", "most"),
    [
        # torch asks the driver for what this one may not have or permit.
        pytest.param(["--tool=memcheck", "--report-api-errors=no"], 0, id="memcheck"),
        # 20 s a way.
        pytest.param(["--tool=racecheck"], 1, id="racecheck"),
    ],
)
def test_nothing_is_found(options: list[str], most: int, part: str) -> None:
    if torch.cuda.device_count() < 2:
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
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "whole" in done.stdout  # it came to the end

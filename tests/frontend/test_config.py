import os
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest

import autofuse
from autofuse.options import resolve, settings


def test_patch_is_undone() -> None:
    before = autofuse.config.policy
    with autofuse.config.patch(policy="never", order="ring"):
        assert settings().policy == "never"
        assert settings().order == "ring"
    assert settings().policy == before


def test_environment() -> None:
    code = "from autofuse import config as c; print(c.policy, c.patterns, c.order, c.timeout_s, c.table)"
    changes = {"POLICY": "always", "PATTERNS": "matmul_all_reduce", "ORDER": "ring", "TIMEOUT_S": "7.5"}
    changes["TABLE"] = "my.json"
    environment = os.environ | {f"AUTOFUSE_{name}": value for name, value in changes.items()}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["always", "matmul_all_reduce", "ring", "7.5", "my.json"]


@pytest.mark.parametrize("name", ["TIMEOUT_S", "MEASURE_S", "MARGIN"])
def test_a_variable_that_is_no_number_is_named(name: str) -> None:
    sources = Path(autofuse.__file__).with_name("config.py")
    with (
        patch.dict(os.environ, {f"AUTOFUSE_{name}": "soon"}),
        pytest.raises(ValueError, match=f"AUTOFUSE_{name}='soon': expected a number"),
    ):
        runpy.run_path(str(sources))


def test_patterns() -> None:
    assert settings().patterns is None
    assert settings(patterns=["matmul_all_reduce"]).patterns == {"matmul_all_reduce"}
    assert settings(patterns=[]).patterns == frozenset()
    with autofuse.config.patch(patterns="matmul_all_reduce, all_gather_matmul"):
        assert settings().patterns == {"matmul_all_reduce", "all_gather_matmul"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "sometimes"}, "policy='sometimes'.*'auto', 'always', 'never'"),
        ({"order": "fast"}, "order='fast'.*'direct', 'ring', 'oblivious'"),
        ({"patterns": ["matmul_allreduce"]}, "'matmul_allreduce'.*'matmul_all_reduce'"),
        ({"patterns": 3}, "patterns=3"),
        ({"timeout_s": -1}, "timeout_s=-1.*positive"),
        ({"timeout_s": 0}, "timeout_s=0.*positive"),
        ({"polcy": "auto"}, "'polcy'.*did you mean 'policy'"),
        ({"epilogue_fuson": True}, "'epilogue_fuson'.*'epilogue_fusion'"),
        ({"qqqq": 1}, "unknown option 'qqqq'; autofuse knows policy"),
    ],
)
def test_bad_options_raise(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(None, options)


def test_an_unknown_mode_raises() -> None:
    with pytest.raises(ValueError, match=r"mode='fastest'.*'max-autotune'"):
        resolve("fastest", None)


def test_inductor_options_pass_and_win_over_the_mode() -> None:
    own, patches = resolve("max-autotune", {"policy": "always", "triton.cudagraphs": False})
    assert own.policy == "always"
    assert patches["max_autotune"] is True
    assert patches["triton.cudagraphs"] is False
    assert "policy" not in patches


def test_a_time_limit_holds_for_the_process() -> None:
    before = autofuse.config.timeout_s
    try:
        resolve(None, {"timeout_s": 12})
        assert autofuse.config.timeout_s == 12.0
    finally:
        autofuse.config.timeout_s = before


def test_settings_hold_on_all_threads() -> None:
    """Autograd runs backward graphs on threads of its own."""

    def elsewhere() -> list[object]:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: [config.timeout_s, config.measure, config.policy]).result()

    config = autofuse.config
    before = elsewhere()
    with config.patch(timeout_s=3.5, measure=True, policy="never"):
        assert elsewhere() == [3.5, True, "never"]
    assert elsewhere() == before

"""Settings of autofuse: `autofuse.config.policy = "always"`, `with autofuse.config.patch(order="ring")`,
`AUTOFUSE_TIMEOUT_S=30 python train.py`, or `torch.compile(..., options={"policy": "always"})`."""

import os
import sys
from typing import TYPE_CHECKING

from torch.utils._config_module import Config, install_config_module

policy: str = Config(default="auto", env_name_default="AUTOFUSE_POLICY")
"""`auto`: fuse where the cost model predicts a gain; `always`: wherever it is legal; `never`: report only."""

patterns: str = Config(default="all", env_name_default="AUTOFUSE_PATTERNS")
"""Names of fused ops to look for, separated by commas; `all` for every one. `options` also takes a list."""

order: str = Config(default="direct", env_name_default="AUTOFUSE_ORDER")
"""Order of the tiles of a plan: `direct`, `ring`, or `oblivious` (the control of every measurement)."""

table: str = Config(default="", env_name_default="AUTOFUSE_TABLE")
"""File with constants for the cost model, as `autofuse tune` writes it; equal on all ranks. Before
the tables in the cache folder (`~/.cache/autofuse`) and those that come with autofuse."""

measure: bool = Config(default=False, env_name_force="AUTOFUSE_MEASURE")
"""On GPUs: measure all ways to run a dense op when sizes come that nobody has measured, outside of captured
graphs, and keep the result (`~/.cache/autofuse`). Equal on all ranks. Else the nearest sizes decide."""

captured: bool = Config(default=False, env_name_default="AUTOFUSE_CAPTURED")
"""On GPUs: what is compiled will be captured in CUDA graphs, by somebody else than Inductor (whose
`triton.cudagraphs`, of `mode="reduce-overhead"`, says the same). Policy `auto` then fuses short calls, too,
which are otherwise kept: the GPU would wait for its host. Equal on all ranks."""

update: bool = Config(default=False, env_name_default="AUTOFUSE_UPDATE")
"""On GPUs: matmul_reduce_scatter of many tokens adds tiles at their owners as they come (`update` of a plan):
each sum is rounded, and no two runs need give the same bits. Equal on all ranks."""

timeout_s: float = float(os.environ.get("AUTOFUSE_TIMEOUT_S", "300"))
"""Seconds that a fused op waits for a peer before it raises. `AUTOFUSE_TIMEOUT_S`."""

if TYPE_CHECKING:
    from torch.utils._config_typing import *  # noqa: F403


install_config_module(sys.modules[__name__])

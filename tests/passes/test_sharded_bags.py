"""Graphs of embedding bags of which each rank has rows, on CPU ranks and on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autofuse.lowering.gpu import support
from autofuse.passes import Settings, fuse

from .harness import fake_group
from .sharded_bags import BAGS, along_columns, cast, scaled, several, summed
from .test_graphs import rewritten
from .test_on_gpus import moved


def tables(*widths: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [
        t
        for width in widths
        for t in (torch.zeros(6, width, dtype=dtype), torch.zeros(9).long(), torch.zeros(BAGS).long())
    ]


def test_pooled_rows_of_several_tables_are_one_product() -> None:
    text = rewritten(several, *tables(3, 8)).replace(".default", "").replace(", '0', 'direct', SITE", "")
    assert_expected_inline(
        text.replace("matmul_reduce_scatter_default:  = autofuse.matmul_", ""),
        """\
reduce_scatter([arg0, arg1], [arg2, arg3], [arg4, arg5], 'bags sum 0 -1', 'sum', 0, 1, False, [], '', '')
getitem_8: [2, 11] = getitem(matmul_reduce_scatter_default, 0)
sin: [2, 11] = aten.sin(getitem_8)
return (sin,)""",
    )


@pytest.mark.parametrize(
    ("fn", "dtype", "detail"),
    [
        (several, torch.float32, ""),
        (several, torch.bfloat16, ""),
        (summed, torch.float16, ""),
        (cast, torch.float32, ""),
        (scaled, torch.float32, "not 'bags sum 0 -1; mul %1; to bfloat16'"),
        (along_columns, torch.float32, "else whole rows"),
    ],
)
def test_what_gpus_take_and_keep(fn: Callable[..., Any], dtype: torch.dtype, detail: str) -> None:
    with fake_group(4), FakeTensorMode(), patch.object(support, "why_not", lambda device: None):
        tensors = [torch.empty(t.shape, dtype=t.dtype) for t in tables(4, 8, dtype=dtype)]
        (site,) = fuse(moved(make_fx(fn)(*tensors).graph), Settings("always"), "inference", "0").sites
    assert site.fused or site.detail.endswith(detail)
    assert site.fused == (not detail)

"""Graphs of embedding bags of which each rank has rows, on CPU ranks and on GPUs."""

from __future__ import annotations

from unittest.mock import patch

import torch
from expecttest import assert_expected_inline
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autofuse.lowering.gpu import support
from autofuse.passes import Settings, fuse

from .harness import fake_group
from .sharded_bags import BAGS, several
from .test_graphs import rewritten
from .test_on_gpus import moved

TABLES = [
    t for width in (3, 8) for t in (torch.zeros(6, width), torch.zeros(9).long(), torch.zeros(BAGS).long())
]


def test_pooled_rows_of_several_tables_are_one_product() -> None:
    text = rewritten(several, *TABLES).replace(".default", "").replace(", '0', 'direct', SITE", "")
    assert_expected_inline(
        text.replace("matmul_reduce_scatter_default:  = autofuse.matmul_", ""),
        """\
reduce_scatter([arg0, arg1], [arg2, arg3], [arg4, arg5], 'bags sum 0 -1', 'sum', 0, 1, False, [], '', '')
getitem_8: [2, 11] = getitem(matmul_reduce_scatter_default, 0)
sin: [2, 11] = aten.sin(getitem_8)
return (sin,)""",
    )


def test_gpus_keep_them() -> None:
    with fake_group(4), FakeTensorMode(), patch.object(support, "why_not", lambda device: None):
        tensors = [torch.empty(t.shape, dtype=t.dtype) for t in TABLES]
        (site,) = fuse(moved(make_fx(several)(*tensors).graph), Settings("always"), "inference", "0").sites
    assert site.detail.startswith(
        "GPU kernels reduce sums of up to 4 matmuls as they are, not 'bags sum 0 -1'"
    )

"""Casts move to the side of a collective where fewer bytes travel: graphs, and bits on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from expecttest import assert_expected_inline
from torch import Tensor

import autofuse
from tests.ranks import RankPool

from .dense import group
from .harness import passes_only
from .test_graphs import rewritten


def exchange(x: Tensor, to: list[int] | None = None, of: list[int] | None = None) -> Tensor:
    return funcol.wait_tensor(funcol.all_to_all_single(x, of, to, group()))


def gather(x: Tensor, dim: int = 0) -> Tensor:
    return funcol.wait_tensor(funcol.all_gather_tensor(x, dim, group()))


def narrowed(x: Tensor) -> Tensor:
    return exchange(x).view(4, -1, 6).transpose(0, 1).bfloat16().relu()


def sent_to_all(x: Tensor) -> Tensor:
    """Only the source sends a tensor that it has widened. The source does not read the result."""
    sent = x.bfloat16().float() if dist.get_rank() == 0 else torch.empty_like(x)
    received = funcol.wait_tensor(funcol.broadcast(sent, 0, group()))
    return x.relu() if dist.get_rank() == 0 else received.t().bfloat16().relu()


def narrowed_parts(x: Tensor) -> Tensor:
    """Split and joined between the gather and two casts."""
    whole = gather(x, 1)
    return whole.bfloat16().relu() + whole.t()[:, :3].to(torch.bfloat16).sum()


def widened(x: Tensor) -> Tensor:
    return exchange(x.bfloat16().t().float().reshape(8, -1)) * 2


def both(x: Tensor) -> Tensor:
    return gather(x.half().sin().float())[2:].half().relu()


def chosen(x: Tensor) -> Tensor:
    """Rows that an index chooses behind the exchange, others before."""
    rows = x.abs().sum(1).long() % 8
    return exchange(x.bfloat16()[rows].float())[rows, :].bfloat16().relu()


def placed(x: Tensor) -> Tensor:
    """Rows that an index puts into an empty buffer."""
    rows = x.sum(1).argsort()
    return exchange(torch.empty(8, 6).index_put((rows,), x.bfloat16().float())) * 2


def added(x: Tensor) -> Tensor:
    """Rows that are added to each other in the wide dtype; narrowed behind the exchange."""
    rows = x.abs().sum(1).long() % 8
    return exchange(torch.zeros(8, 6).index_put((rows,), x.bfloat16().float(), accumulate=True)) * 2


def added_once(x: Tensor) -> Tensor:
    """Rows that are added to nothing."""
    rows = x.sum(1).argsort()
    return exchange(torch.zeros(8, 6).index_put((rows,), x.bfloat16().float(), accumulate=True)) * 2


def read_wide(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = gather(x)
    return whole.bfloat16().relu(), whole.sum()


def returned(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = gather(x)
    return whole.bfloat16().relu(), whole


def two_dtypes(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = gather(x)
    return whole.bfloat16().relu(), whole.half().relu()


def reduced(x: Tensor) -> Tensor:
    return funcol.wait_tensor(funcol.all_reduce(x.bfloat16().float(), "sum", group())).bfloat16().relu()


def dispatched(x: Tensor, w: Tensor) -> Tensor:
    """An exchange in float32, of experts in bfloat16."""
    return torch.bmm(exchange(x).view(4, 2, -1, 6).transpose(0, 1).reshape(2, -1, 6).bfloat16(), w)


def collectives(fn: Callable[..., Any], *args: Tensor, policy: str = "always") -> str:
    """The collectives and the casts of the rewritten graph."""
    lines = rewritten(fn, *args, policy=policy).splitlines()
    words = ("_c10d_functional.all", "_c10d_functional.broadcast", "convert_element_type", "autofuse.")
    found = (line.replace("torch.", "") for line in lines if any(word in line for word in words))
    return "\n".join(line[:100] for line in found)


def test_a_narrowing_cast_moves_before_an_exchange() -> None:
    assert_expected_inline(
        collectives(narrowed, torch.zeros(8, 6)),
        """\
convert_element_type_default: [8, 6] = prims.convert_element_type.default(arg0, bfloat16)
all_to_all_single: [8, 6] = _c10d_functional.all_to_all_single.default(convert_element_type_default,""",
    )
    assert_expected_inline(
        collectives(narrowed_parts, torch.zeros(8, 6)),
        """\
convert_element_type_default: [8, 6] = prims.convert_element_type.default(arg0, bfloat16)
all_gather_into_tensor: [32, 6] = _c10d_functional.all_gather_into_tensor.default(convert_element_ty""",
    )


def test_a_widening_cast_moves_behind_an_exchange() -> None:
    assert_expected_inline(
        collectives(widened, torch.zeros(8, 6)),
        """\
convert_element_type: [8, 6] = prims.convert_element_type.default(arg0, bfloat16)
permute: [6, 8] = aten.permute.default(convert_element_type, [1, 0])
all_to_all_single: [8, 6] = _c10d_functional.all_to_all_single.default(reshape_default, [2, 2, 2, 2]
convert_element_type_default: [8, 6] = prims.convert_element_type.default(wait_tensor_1, float32)
mul: [8, 6] = aten.mul.Tensor(convert_element_type_default, 2)""",
    )


def test_rows_move_with_the_cast() -> None:
    for fn in (chosen, placed, added_once):
        lines = rewritten(fn, torch.zeros(8, 6)).splitlines()
        (sent,) = (i for i, line in enumerate(lines) if "all_to_all_single.default" in line)
        assert not any("default(" in line and "torch.float32)" in line for line in lines[:sent]), (fn, lines)


def test_a_cast_stays_where_not_all_read_it() -> None:
    for fn in STAYING:
        assert collectives(fn, torch.zeros(8, 6)) == collectives(fn, torch.zeros(8, 6), policy="never"), fn


def test_nothing_moves_where_nothing_is_to_change() -> None:
    assert "(arg0, " in collectives(narrowed, torch.zeros(8, 6), policy="never").splitlines()[0]


def test_what_is_fused_is_sent_narrow() -> None:
    assert_expected_inline(
        collectives(dispatched, torch.zeros(16, 6), torch.zeros(2, 6, 4, dtype=torch.bfloat16)),
        """\
convert_element_type_default: [16, 6] = prims.convert_element_type.default(arg0, bfloat16)
reshape_default: [4, 2, 2, 6] = aten.reshape.default(convert_element_type_default, [4, 2, 2, 6])
all_to_all_expert_matmul_default:  = autofuse.all_to_all_expert_matmul.default(reshape_default, [arg""",
    )


def trained(x: Tensor) -> Tensor:
    """The backward widens before it sends."""
    sent = [x.shape[0] // group().size()] * group().size()
    return funcol.all_to_all_single_autograd(x, sent, sent, group()).bfloat16().relu()


MOVED = (narrowed, narrowed_parts, widened, both, chosen, placed, added_once, trained)
STAYING = (read_wide, returned, two_dtypes, reduced, added, sent_to_all)


def _alike(rank: int, world: int) -> list[str]:
    """Programs whose results differ from those of eager in a bit, a shape or a stride."""
    wrong = []
    for fn in (*MOVED, *STAYING):
        torch._dynamo.reset()
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(rank))
        if fn is narrowed:
            x = x.repeat(world, 2)

        def step(call: Callable[..., Any], x: Tensor = x, fn: object = fn) -> list[Tensor]:
            leaf = x.clone().requires_grad_(fn is trained)
            with torch.set_grad_enabled(fn is trained):
                y = call(leaf)
                outputs = list(y) if isinstance(y, tuple) else [y]
                if fn is trained:
                    (y.float() * (1 + rank)).sum().backward()
                    assert leaf.grad is not None
                    outputs.append(leaf.grad)
            return outputs

        with autofuse.debug():
            found = step(torch.compile(fn, backend=passes_only()))
        wrong += [
            f"{fn.__name__}, {i}"
            for i, (a, b) in enumerate(zip(found, step(fn), strict=True))
            if a.dtype != b.dtype or not torch.equal(a, b)
        ]
    return wrong


def test_bits_on_ranks(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(_alike) == [[], []]

"""What the executors of products share: steps that follow from shapes alone, made once and run by every call.

A `Recipe` holds all that is known before a call (plan, slices, offsets), as a list of steps, one for each
action of the plan. `State` holds the tensors of the call that runs them.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from autofuse.lowering.cpu.workspace import Call
from autofuse.lowering.cpu.workspaces import workspace_for
from autofuse.lowering.reference.product import evaluate, keeps_contraction, parse, product_reference
from autofuse.native_kernels.cpu import DTYPES

Spec: TypeAlias = tuple[tuple[torch.Size, torch.dtype], ...]


@dataclass(slots=True)
class State:
    """The tensors of one call. `product` is empty unless the product is returned or computed in one piece.
    `results` are those of a tail. `kept` is the tensor that `keep_product` returns."""

    call: Call
    x: Sequence[Tensor]
    w: Sequence[Tensor]
    operands: Sequence[Tensor]
    out: Tensor
    product: Tensor
    tail_operands: Sequence[Tensor] = ()
    results: Sequence[Tensor] = ()
    kept: Tensor | None = None


Step: TypeAlias = Callable[[State], object]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A call of given shapes.

    `whole`: the product is computed in one piece before the plan starts. `results`: shapes and dtypes of the
    results of a tail. The op returns them in place of the output, which then only holds sums.
    """

    shape: tuple[int, int]
    out_shape: tuple[int, int]
    dtype: torch.dtype
    key: str
    nbytes: int
    steps: tuple[Step, ...]
    whole: bool = False
    results: tuple[tuple[tuple[int, int], torch.dtype], ...] = ()


class Kind(Hashable, Protocol):
    """The key of a recipe: the arguments of a call, with shapes and dtypes in place of tensors."""

    @property
    def x(self) -> Spec: ...

    @property
    def w(self) -> Spec: ...

    @property
    def operands(self) -> Spec: ...

    @property
    def product(self) -> str: ...

    def recipe(self, p: Tensor, world: int, rank: int) -> Recipe:
        """The recipe of a rank; p: the product without its values."""


class Arguments(Protocol):
    """The arguments that the executors of all products read."""

    @property
    def x(self) -> list[Tensor]: ...

    @property
    def w(self) -> list[Tensor]: ...

    @property
    def operands(self) -> list[Tensor]: ...

    @property
    def product(self) -> str: ...

    @property
    def keep_product(self) -> bool: ...

    @property
    def group_name(self) -> str: ...

    @property
    def site(self) -> str: ...


def spec(tensors: Sequence[Tensor]) -> Spec:
    return tuple((t.shape, t.dtype) for t in tensors)


def infer_product(kind: Kind) -> Tensor:
    """The product without its values."""
    weights = [t.mT.contiguous().mT for t in meta(kind.w)]  # column-major, as scaled_mm wants them
    return product_reference(meta(kind.x), weights, meta(kind.operands), kind.product)


def meta(spec: Spec) -> list[Tensor]:
    """Tensors without their values."""
    return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in spec]


@lru_cache(maxsize=2048)
def recipe_of(kind: Kind, world: int, rank: int) -> Recipe | None:
    """The recipe, which is made once; None for a dtype without a kernel."""
    p = infer_product(kind)
    return kind.recipe(p, world, rank) if p.dtype in DTYPES else None


def run(op: str, args: Arguments, kind: Kind, tail_operands: Sequence[Tensor] = ()) -> Any:
    """A call of an op, as `docs/ops.md` defines it; NotImplemented for a dtype without a kernel."""
    workspace = workspace_for(args.group_name)
    recipe = recipe_of(kind, workspace.world, workspace.rank)
    if recipe is None:
        return NotImplemented
    x, keep = args.x, args.keep_product
    out = x[0].new_empty(recipe.out_shape, dtype=recipe.dtype)
    apart = keeps_contraction(args.product)
    has_product = recipe.whole or (keep and not apart)
    product = x[0].new_empty(recipe.shape if has_product else (0, 0), dtype=recipe.dtype)
    kept = product
    if recipe.whole:
        kept = evaluate(product, x, args.w, args.operands, args.product)
    elif keep and apart:
        dtype = parse(args.product).out_dtype or args.w[0].dtype
        kept = x[0].new_empty((x[0].shape[0], args.w[0].shape[-1]), dtype=dtype)
    results = [x[0].new_empty(shape, dtype=dtype) for shape, dtype in recipe.results]
    with workspace.call(op, args.site, recipe.key, recipe.nbytes) as call:
        state = State(call, x, args.w, args.operands, out, product, tail_operands, results, kept)
        for step in recipe.steps:
            step(state)
    results = results or [out]
    return [*results, kept] if keep else results

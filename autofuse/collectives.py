"""Registration of custom ops that are collectives, so that autofuse fuses them like torch's collectives."""

from collections.abc import Callable, Mapping

import torch

from autofuse.groups import Group, group_name
from autofuse.passes.opaque import ROLES, Opaque, register

# Names of arguments that are recognised without `arguments=`, by role.
_NAMES = {
    "group": ("group_name", "group"),
    "world": ("world_size", "group_size"),
    "reduce_op": ("reduce_op",),
    "dim": ("dim",),
    "output_splits": ("output_splits", "output_split_sizes"),
    "input_splits": ("input_splits", "input_split_sizes"),
}


def register_collective(
    op: str | torch._ops.OpOverload,
    kind: str,
    *,
    group: Callable[[str], Group] | None = None,
    reduce_op: str = "sum",
    arguments: Mapping[str, str] | None = None,
) -> None:
    """Let `backend="autofuse"` treat a custom op as a collective: `y = op(x, ..., group_name)`.

    all_reduce      y = sum over ranks of x
    reduce_scatter  y = this rank's part of that sum, which is cut along `dim`
    all_gather      y = the x of all ranks, concatenated along `dim`
    all_to_all      y = the parts that all ranks send to this rank; each rank cuts its x along dim 0

    If a site is kept, the op itself runs. Register the same ops on all ranks, before compiling.

    Args:
        op: qualified name, `"vllm::all_reduce"`, or overload. It must return one new Tensor and change no
            argument.
        kind: one of the four above.
        group: function from the op's group argument to the process group; by default the argument is the name
            of the group. It is called when a graph is compiled, and must return the same group as long as the
            graph is used.
        reduce_op: `sum` or `avg`, if no argument of the op has this role.
        arguments: names of the op's arguments by role (`input`, `group`, `world`, `reduce_op`, `dim`,
            `output_splits`, `input_splits`), if they differ from `group_name`, `world_size`, `dim` and so on.
            The input is the first Tensor. Without splits the parts are equal. A call is kept if an argument
            without a role has a value other than its default.

    Raises:
        ValueError: for an unknown op, kind or role, and for an op whose schema does not fit.
    """
    overload = _overload(op)
    name = overload._schema.name
    if kind not in ROLES:
        raise ValueError(f"{name}: kind={kind!r}; expected one of {', '.join(map(repr, ROLES))}")
    if overload.namespace in ("_c10d_functional", "autofuse"):
        raise ValueError(f"{name} need not be registered: autofuse knows it")
    schema = overload._schema
    if schema.is_mutable or [str(r.type) for r in schema.returns] != ["Tensor"]:
        raise ValueError(f"{name}: expected an op that mutates nothing and returns one Tensor, got {schema}")
    roles = _roles(overload, kind, dict(arguments or {}))

    def resolve(own: str) -> str:
        return group_name(own if group is None else group(own), name)

    register(overload, Opaque(name, kind, roles, reduce_op, resolve))


def _overload(op: str | torch._ops.OpOverload) -> torch._ops.OpOverload:
    if isinstance(op, torch._ops.OpOverload):
        return op
    namespace, _, rest = str(op).partition("::")
    name, _, overload = rest.partition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    except (AttributeError, RuntimeError):
        found = None
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"there is no op {op!r}; pass 'namespace::name' of one that has been defined")
    return found


def _roles(op: torch._ops.OpOverload, kind: str, given: dict[str, str]) -> dict[str, str]:
    """The name of the argument for each role that the op has."""
    schema = op._schema
    known = {a.name: a for a in schema.arguments}
    for role, name in given.items():
        if role not in ROLES[kind]:
            raise ValueError(
                f"{schema.name}: arguments of {kind} have no role {role!r}; expected {', '.join(ROLES[kind])}"
            )
        if name not in known:
            raise ValueError(f"{schema.name} has no argument {name!r}; it has {', '.join(known)}")
    roles = dict(given)
    tensors = [a.name for a in schema.arguments if str(a.type) == "Tensor"]
    if "input" not in roles and tensors:
        roles["input"] = tensors[0]
    for role in ROLES[kind]:
        named = [n for n in _NAMES.get(role, ()) if n in known and n not in roles.values()]
        if role not in roles and named:
            roles[role] = named[0]
    for role in ("input", "group"):
        if role not in roles:
            raise ValueError(
                f"{schema.name}: no argument is the {role}; say which with arguments={{{role!r}: ...}}"
            )
    for name, argument in known.items():
        if name not in roles.values() and not argument.has_default_value():
            raise ValueError(
                f"{schema.name}: argument {name!r} has no meaning for {kind}; "
                f"give it a default or a role, one of {', '.join(ROLES[kind])}"
            )
    return roles

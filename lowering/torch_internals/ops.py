"""Dense ops, and the way of a call through the dispatcher and autograd."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from traceback import walk_stack
from typing import Any

import torch


def scaled_mm(
    x: torch.Tensor, w: torch.Tensor, scale_x: torch.Tensor, scale_w: torch.Tensor, dtype: torch.dtype | None
) -> torch.Tensor:
    """`(x * scale_x) @ (w * scale_w)` of low-precision floats."""
    return torch._scaled_mm(x, w, scale_x, scale_w, out_dtype=dtype)


def has_grouped_mm() -> bool:
    """Whether this release of torch has `torch._grouped_mm`."""
    return hasattr(torch, "_grouped_mm")


def grouped_mm(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """`x: [R, K]` times `w: [E, K, N]`. Expert e has the rows from `ends[e - 1]` to `ends[e]` (int32)."""
    result: torch.Tensor = torch._grouped_mm(x, w, offs=ends)
    return result


def has_values(t: torch.Tensor) -> bool:
    """Whether the tensor is more than its shape and dtype, as while a graph is traced."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not (t.is_meta or isinstance(t, FakeTensor))


def register_autograd(
    library: torch.library.Library,
    overload: torch._ops.OpOverload,
    backward: Callable[..., Any],
    setup_context: Callable[..., None],
    devices: Mapping[str, Callable[..., Any]],
) -> None:
    """As `torch.library.register_autograd`, but calls without gradients call the function of their device. A
    second pass through the dispatcher takes as long as all other work before a launch.
    """
    from torch._library.autograd import Info, make_autograd_impl

    record = make_autograd_impl(overload, Info(backward, setup_context))
    keys, below = torch._C.DispatchKey, torch._C._after_autograd_keyset
    direct = {
        torch._C.DispatchKeySet(getattr(keys, device)).raw_repr(): run for device, run in devices.items()
    }

    def autograd(keyset: Any, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            run = direct.get((keyset & below).raw_repr())
            if run is not None:
                return run(*args)
        return record(keyset, *args)

    library.impl(overload._schema.name.partition("::")[2], autograd, "Autograd", with_keyset=True)


def nobody_intervenes() -> bool:
    """Whether an op that is called now reaches its device's implementation with the arguments as they are,
    if these are plain tensors: no mode, no transform, and nobody traces or compiles."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def current_raw_stream(device: int) -> int:
    """The address of the device's current CUDA stream, without a stream object, which takes microseconds."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def empty_strided(device_type: str) -> Callable[..., torch.Tensor]:
    """`empty(shape, strides, dtype)` on the current device of a type, as Inductor's code calls it: without
    the dispatcher's questions about factories."""
    from torch._C._dynamo import guards

    found: Callable[..., torch.Tensor] = getattr(guards, f"_empty_strided_{device_type}")
    return found


def alike(tensors: Sequence[torch.Tensor], lengths: bool = True) -> Callable[..., bool]:
    """`found(*others)`: whether as many others have the same types, dtypes, devices, sizes, strides and
    `requires_grad` as these. False if a tensor occurs twice. lengths: False for vectors of any length,
    without gaps. It is one call of C, as Dynamo's guards make it, and holds no tensor."""
    from torch._C._dynamo.guards import TensorGuards

    # The stubs of torch say otherwise: a list for each tensor.
    sizes: Any = [list(t.shape) if lengths else [None] * t.dim() for t in tensors]
    strides: Any = [list(t.stride()) if lengths else [1] * t.dim() for t in tensors]
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    found: Callable[..., bool] = guards.check
    return found


def settings_of(module: Any, *names: str) -> Callable[[], tuple[Any, ...]]:
    """What users have set of these settings of a module of torch's kind. To ask for their values takes a
    microsecond each."""
    entries = [module._config[name] for name in names]
    nested = hasattr(entries[0].user_override, "_value")  # as `autofuse.config` has it, torch 2.13 and later
    value = attrgetter("user_override._value" if nested else "user_override")
    return lambda: tuple(map(value, entries))


def setting_of(module: Any, name: str) -> Callable[[], Any]:
    """The value of a setting, which the module is asked for only when users have set another one."""
    chosen, known = settings_of(module, name), list[Any]()

    def value() -> Any:
        now = chosen()
        if not known or known[0] != now:
            known[:] = now, getattr(module, name)
        return known[1]

    return value


def gpu_sleep(cycles: int) -> None:
    """The current stream of the current GPU has nothing but this to do."""
    torch.cuda._sleep(cycles)


def auto_functionalized() -> Any:
    """The higher-order op that calls an op on copies of the arguments that it changes, and returns them."""
    return torch.ops.higher_order.auto_functionalized_v2


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype, `bf16`."""
    from torch.fx.graph import dtype_abbrs

    return dtype_abbrs.get(dtype, str(dtype).removeprefix("torch."))


def backward_number() -> int:
    """That of the backward that now runs; each has its own."""
    return int(torch._C._current_graph_task_id())


def in_other_backward() -> bool:
    """Whether the backward that now runs was begun inside of another one, by the backward of an autograd
    function, as checkpoints with `use_reentrant=True` do."""
    from torch.autograd.function import BackwardCFunction

    calls = [getattr(BackwardCFunction, name, None) for name in ("apply", "apply_boxed")]  # torch 2.13: both
    codes = [call.__code__ for call in calls if call is not None]
    return any(frame.f_code in codes for frame, _ in walk_stack(None))


def after_backward(function: Callable[[], None]) -> None:
    """Calls `function` when the backward that now runs has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(function)

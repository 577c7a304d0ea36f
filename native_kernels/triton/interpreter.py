"""Makes Triton's interpreter (TRITON_INTERPRET=1) fit for the kernels, on CPU processes that share memory."""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle


def install() -> None:
    """Change the interpreter of this process.

    - After a launch it would copy every argument onto itself, over what peers have stored meanwhile.
    - bfloat16, which numpy lacks, it would multiply as integers, and cut off where devices round.
    - Scalars, which it keeps as arrays of one element, are no bounds of a `range` for numpy since 2.4.
    - `tl.range` counts in numbers of Python, which constants of a kernel cannot divide.
    """
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot
    patch, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang_core

    def cast_rounded(self: Any, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        to = dst_type.scalar
        if src.dtype.scalar == tl.float32 and to == tl.bfloat16:
            values = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16()
            return TensorHandle(values.view(torch.uint16).numpy(), to)
        if src.dtype.scalar == tl.bfloat16 and to == tl.float32:
            return TensorHandle((src.data.astype(np.uint32) << 16).view(np.float32), to)
        return cast(self, src, dst_type)

    def dot_of_values(self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (cast_rounded(self, operand, tl.float32) for operand in (a, b))
        return dot(self, a, b, *rest)

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def patch_range(language: Any, scope: Any) -> None:
        patch_language(language, scope)
        count, scalar = language.range, interpreter.interpreter_semantic.to_tensor
        scope.set_attr(language, "range", lambda *args, **settings: map(scalar, count(*args, **settings)))

    GridExecutor._restore_args_dev = lambda *args: None
    InterpreterBuilder.cast_impl = cast_rounded
    InterpreterBuilder.create_dot = dot_of_values
    interpreter._patch_lang_tensor = patch_tensor
    interpreter._patch_lang_core = patch_range

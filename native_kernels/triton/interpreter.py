"""Patches Triton's interpreter (TRITON_INTERPRET=1) so that it runs the kernels on CPU processes as ranks."""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle


def install() -> None:
    """Patch the interpreter of this process.

    - The interpreter copies every argument back after a launch, over data that peers have stored meanwhile.
    - It multiplies bfloat16, which numpy lacks, as integers, and truncates where devices round.
    - It keeps scalars as arrays of one element, which numpy 2.4 and later refuses as bounds of a `range`.
    - Its `tl.range` yields Python numbers, which constants of a kernel cannot divide.
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

"""The kernels in CUDA C++, each with its launcher beside it."""

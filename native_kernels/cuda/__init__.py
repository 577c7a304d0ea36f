"""CUDA C++ kernels for NVIDIA GPUs, compiled when a process first needs them (`compiler`, `launcher`)."""

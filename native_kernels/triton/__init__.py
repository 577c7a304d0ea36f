"""Triton kernels for NVIDIA GPUs, and the functions with which they talk to peers (`comm`)."""

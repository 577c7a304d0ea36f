"""What kernels in Triton and in CUDA C++ share: memory that peers map, and copy engines."""

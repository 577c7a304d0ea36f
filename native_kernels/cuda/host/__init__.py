"""Compiles CUDA C++, launches kernels, and has functions that several launchers share."""

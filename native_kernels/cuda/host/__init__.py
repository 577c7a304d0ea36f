"""Compiles CUDA C++ and launches kernels, and what launchers of alike kernels share."""

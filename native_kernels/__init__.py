"""Kernels that execute plans, by device. They know nothing of graphs or plans."""

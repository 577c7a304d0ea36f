"""Executors of plans on CPU ranks, and the memory that these share."""

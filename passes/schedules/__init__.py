"""Equivalent schedules of a graph: rewrites that change what is computed where, each with its legality."""

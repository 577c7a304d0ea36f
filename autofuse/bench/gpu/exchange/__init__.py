"""What the benchmarks around an all-to-all share."""

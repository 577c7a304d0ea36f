"""What the benchmarks of exchanges share: embedding, experts, sums."""

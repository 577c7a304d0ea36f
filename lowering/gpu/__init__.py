"""The fused ops on NVIDIA GPUs of one host: memory that ranks map, ways to run a call, choice of a way."""

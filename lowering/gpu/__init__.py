"""The dense ops on NVIDIA GPUs of one host: memory that ranks map, ways to run a call, and their choice."""

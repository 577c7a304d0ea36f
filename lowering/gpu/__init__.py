"""The dense ops on NVIDIA GPUs of one host: memory that all ranks map, ways to run a call, and which one is taken."""

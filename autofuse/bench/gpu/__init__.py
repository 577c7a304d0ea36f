"""The benchmarks on the GPUs of torchrun: what they share, and a room for each family of ops."""

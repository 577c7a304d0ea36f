"""The symmetric memory of a group of GPUs, and descriptors of embedding tables."""

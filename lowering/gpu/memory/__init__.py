"""The symmetric memory of a group of GPUs, its failures, and the descriptors of tensors."""

"""The symmetric memory of a group of GPUs, and the tables of addresses in it."""

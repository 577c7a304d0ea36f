"""The dense ops on GPUs."""

"""The expert ops on GPUs."""

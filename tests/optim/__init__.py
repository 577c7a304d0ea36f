"""Optimizers whose step exchanges gradients."""

"""Simulated machines: the published tables of T3 and of fused embeddings, H200, and a script's own graphs."""

"""Rows of experts, or of tables, that a rank adds up, and the sums over the ranks."""

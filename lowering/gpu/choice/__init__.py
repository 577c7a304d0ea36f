"""Which way a call takes: points that were measured, and how they are measured."""

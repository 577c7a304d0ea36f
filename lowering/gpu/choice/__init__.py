"""Which way a call takes: a model, measured points that correct it, and how they are measured."""

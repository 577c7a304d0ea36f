"""The benchmark on CPU ranks: backend="autofuse" beside stock Inductor with gloo, in one run."""

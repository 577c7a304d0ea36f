"""`autofuse bench embedding`: bags, their gradients and updates of their tables."""

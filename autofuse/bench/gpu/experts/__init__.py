"""`autofuse bench experts`: expert matmuls and the all-to-all beside them."""

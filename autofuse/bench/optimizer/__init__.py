"""`autofuse bench optimizer`: steps of optimizers with their exchange of gradients."""

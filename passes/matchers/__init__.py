"""One matcher a pattern, and what they share. `passes.fuse` lists them."""

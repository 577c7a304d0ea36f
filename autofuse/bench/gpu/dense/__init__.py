"""`autofuse bench dense`: the dense ops beside what one would use instead."""

"""The ops in plain torch, piece by piece: what references are made of and executors evaluate on tiles."""

"""autofuse: a torch.compile backend that fuses compute with the collective it feeds or consumes."""

from pathlib import Path

# In a checkout the rooms are top-level folders; in a wheel they lie inside the package.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "passes").is_dir() and (_checkout / "lowering").is_dir():
    __path__.append(str(_checkout))

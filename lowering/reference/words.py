"""The words that products and tails are written in: operands (`%0`), numbers and dtypes.

They raise ValueError with what a word is not; the caller adds the text that it stands in.
"""

import torch


def operand(word: str) -> int:
    if word.startswith("%") and word[1:].isdigit():
        return int(word[1:])
    raise ValueError(f"'{word}' is not an operand such as %0")


def number(word: str) -> float | int:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    raise ValueError(f"'{word}' is neither a number nor an operand such as %0")


def dtype(word: str) -> torch.dtype:
    found = getattr(torch, word, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"'{word}' is not a dtype")
    return found

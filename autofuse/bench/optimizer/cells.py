"""The tensors of each row of the benchmark of optimizers."""

from __future__ import annotations

from collections.abc import Sequence

Shapes = Sequence[tuple[int, ...]]


def _bert(layers: int) -> Shapes:
    d, block = 1024, []
    for _ in range(4):
        block += [(d, d), (d,)]
    return [*block, (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,), (d,), (d,)] * layers


def _gpt2(layers: int) -> Shapes:
    d = 768
    return [
        (d,),
        (d,),
        (d, 3 * d),
        (3 * d,),
        (d, d),
        (d,),
        (d,),
        (d,),
        (d, 4 * d),
        (4 * d,),
        (4 * d, d),
        (d,),
    ] * layers


def _llama(layers: int) -> Shapes:
    d, f = 2048, 8192
    return [(d, d), (512, d), (512, d), (d, d), (f, d), (f, d), (d, f), (d,), (d,)] * layers


CELLS: dict[str, Shapes] = {
    **{f"2^{n}": [(1 << n,)] for n in (10, 14, 18, 22, 24)},
    "64 of 2^10": [(1 << 10,)] * 64,
    "BERT-large, 2 layers": _bert(2),
    "GPT-2, 3 layers": _gpt2(3),
    "Llama-1B, 1 layer": _llama(1),
}
FEW_BUCKETS: dict[str, Shapes] = {
    **{f"2^{n}": [(1 << n,)] for n in (10, 14, 16, 18, 19)},
    "64 of 2^10": [(1 << 10,)] * 64,
    "8 of 2^15": [(1 << 15,)] * 8,
}
"""Steps that are written in tensor ops: up to 512 buckets of 1024 elements."""
ON_GPUS: dict[str, Shapes] = {
    **{f"2^{n}": [(1 << n,)] for n in (10, 14, 18, 22, 26, 28)},
    "64 of 2^10": [(1 << 10,)] * 64,
    "BERT-large": [(30522, 1024), (512, 1024), *_bert(24)],
    "GPT-2": [(50257, 768), (1024, 768), *_gpt2(12)],
    "Llama-1B": [(128256, 2048), *_llama(16)],
}
"""The shapes of each row on GPUs; some take too long on a CPU."""

"""Draws what `autofuse bench embedding` and `experts` measured, as figures 8 and 10 of Punniyamurthy et al.

Times of fused kernels over those of compute and all-to-all one after the other, in two SVGs.

python docs/pictures/exchange.py
"""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BENCHMARKS = HERE.parent / "benchmarks"
WIDTH, HEIGHT, LEFT, TOP, FOOT = 26, 150, 66, 36, 110
FORWARD = "embedding_bag_all_to_all"
COLORS = "#3366aa", "#bb6633"

Bar = tuple[str, list[float]]


def fastest(timings: dict[str, Any]) -> float:
    return min(t["us"] for t in timings.values() if t["us"])


def chart(title: str, legend: list[str], bars: list[Bar]) -> str:
    """Groups of bars, with a line at 1."""
    wide = max(LEFT + len(bars) * WIDTH + 10, 620)
    each = (WIDTH - 6) / len(legend)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{TOP + HEIGHT + FOOT}" '
        'font-family="sans-serif" font-size="10"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="14" font-size="12">{title}</text>',
    ]
    for i, (name, color) in enumerate(zip(legend, COLORS, strict=False)):
        parts.append(f'<rect x="{LEFT + 190 * i}" y="20" width="9" height="9" fill="{color}"/>')
        parts.append(f'<text x="{LEFT + 190 * i + 13}" y="28">{name}</text>')
    for tick in (0, 0.25, 0.5, 0.75, 1):
        y = TOP + HEIGHT * (1 - tick / 1.1)
        parts.append(f'<line x1="{LEFT}" x2="{wide - 6}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ccc"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3:.1f}" text-anchor="end">{tick}</text>')
    for i, (label, values) in enumerate(bars):
        x = LEFT + i * WIDTH + 3
        for j, value in enumerate(values):
            high = HEIGHT * value / 1.1
            parts.append(
                f'<rect x="{x + j * each:.1f}" y="{TOP + HEIGHT - high:.1f}" width="{each - 1:.1f}" '
                f'height="{high:.1f}" fill="{COLORS[j]}"><title>{label}: {value:.2f}</title></rect>'
            )
        at = x + WIDTH / 2, TOP + HEIGHT + 8
        parts.append(
            f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="end" '
            f'transform="rotate(-60 {at[0]:.1f} {at[1]:.1f})">{label}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def embedding(rows: list[dict[str, Any]]) -> list[Bar]:
    """Of the forward."""
    bars = []
    for row in rows:
        cell, ours = row["cell"], row["ours"]["us"]
        if cell.get("op", FORWARD) != FORWARD:
            continue
        mixed = " mixed" if cell["kind"] == "mixed" else ""
        label = f"{cell['batch']} | {cell['tables']}{mixed} | {cell['pooling']}"
        bars.append((label, [ours / fastest(row["peers"]), ours / row["ways"]["merged+nccl"]["us"]]))
    return bars


def experts(rows: list[dict[str, Any]]) -> list[Bar]:
    """Of the combine, as in the paper."""
    chosen = [row for row in rows if row["cell"]["op"] == "expert_matmul_all_to_all"]
    chosen.sort(key=lambda row: (row["cell"]["routing"], row["cell"]["model"], row["cell"]["tokens"]))
    return [
        (
            " ".join(str(row["cell"][key]) for key in ("model", "tokens", "routing")),
            [row["ours"]["us"] / fastest(row["peers"])],
        )
        for row in chosen
    ]


def main() -> None:
    for name, title, legend, bars_of in (
        (
            "embedding",
            "embedding_bag_all_to_all, normalized time (batch | tables a GPU | pooling)",
            ["over the best of torch, then NCCL", "over our kernel, then NCCL"],
            embedding,
        ),
        (
            "experts",
            "expert_matmul_all_to_all, normalized time",
            ["over the best of torch, then NCCL"],
            experts,
        ),
    ):
        data = json.loads((BENCHMARKS / f"{name}_2xh200.json").read_text())
        machine = data["machine"]
        where = f"{title}, {machine['world']} x {machine['gpu']}"
        (HERE / f"{name}.svg").write_text(chart(where, legend, bars_of(data["rows"])))


if __name__ == "__main__":
    main()

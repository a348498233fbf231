"""Draw docs/_static/gallery/spot.png: ranks over time, above the one loss curve.

python examples/spot.py --log spot.json
python benchmarks/gallery/spot.py spot.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Draw, and keep the numbers beside the other results."""
    text = Path(sys.argv[1]).read_text()
    runs = json.loads(text)
    seen, quiet = runs["troubled"], runs["quiet"]
    figure, (top, below) = plt.subplots(2, 1, figsize=(7, 5), height_ratios=(1, 2))
    start = seen[0]["s"]
    top.plot([one["s"] - start for one in seen], [one["ranks"] for one in seen], ".")
    top.set(ylabel="ranks", xlabel="seconds since the first update", ylim=(0, 9), yticks=(3, 5, 8))
    updates = [one["update"] for one in quiet]
    below.plot(updates, [one["loss"] for one in quiet], lw=6, alpha=0.3, label="one process")
    below.plot([one["update"] for one in seen], [one["loss"] for one in seen], ".", label="8, 3, 5")
    below.set(xlabel="update", ylabel="loss")
    below.legend()
    figure.tight_layout()
    figure.savefig(ROOT / "docs/_static/gallery/spot.png", dpi=110)
    (ROOT / "benchmarks/results/gallery-spot.json").write_text(text)


if __name__ == "__main__":
    main()

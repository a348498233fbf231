"""The loss curve as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def plot_losses(losses: Sequence[float], path: Path, *, bigram: float, validation: float) -> str:
    """Draw the training loss by step with two levels to compare with, in nats per byte.

    Args:
        losses: of steps 1, 2, ...
        path: PNG to write.
        bigram: validation loss of the byte bigram.
        validation: the model's own, after the last step.

    Returns:
        What was done, for the user: the path, or why nothing was drawn.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "skipped, matplotlib is not installed (pip install matplotlib)"
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1, label="training loss")
    axes.axhline(bigram, color="tab:red", linestyle="--", label=f"byte bigram {bigram:.3f}")
    axes.axhline(validation, color="tab:green", linestyle=":", label=f"validation {validation:.3f}")
    axes.set(xlabel="optimizer step", ylabel="loss, nats per byte", title="examples/train")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return str(path)

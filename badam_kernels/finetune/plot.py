"""The picture of a run: its loss, and under it the block that trained."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

__all__ = ["plot"]


def plot(path: Path, history: list[dict], held_out: tuple[float, float], num_blocks: int) -> None:
    """Write a PNG. `history` has step, loss and block of every step; `held_out` is the loss before and after."""
    steps = [entry["step"] for entry in history]
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    above.plot(steps, [entry["loss"] for entry in history], color="0.6", linewidth=1, label="training, each batch")
    above.plot([0, steps[-1]], held_out, "o--", color="C0", label=f"held out: {held_out[0]:.3f} before, {held_out[1]:.3f} after")
    above.set_ylabel("loss (nats per token)")
    above.legend(loc="upper right")
    below.step([0, *steps], [history[0]["block"], *(entry["block"] for entry in history)], where="pre", color="C1")
    below.set_ylim(-0.5, num_blocks - 0.5)
    below.set_ylabel("active block")
    below.set_xlabel("step")
    figure.savefig(path, dpi=120)

"""How much of the memory's bandwidth decode uses, by model and batch."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.device_check.targets import TARGETS

# Okabe and Ito's colours, distinct for colour-blind readers.
_COLOURS = ("#0072B2", "#E69F00", "#009E73")
_GROUP_WIDTH = 0.8


def plot_decode(shares: Mapping[str, Mapping[int, float]], path: Path) -> None:
    """Bars by batch, a colour for each model, and the line that was promised."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    batches = sorted({batch for by_batch in shares.values() for batch in by_batch})
    width = _GROUP_WIDTH / len(shares)
    for place, (shape, by_batch) in enumerate(shares.items()):
        at = [batches.index(batch) + place * width for batch in by_batch]
        bars = axes.bar(at, list(by_batch.values()), 0.9 * width, color=_COLOURS[place % 3])
        bars.set_label(shape)
        axes.bar_label(bars, fmt="%.2f", fontsize=9)
    axes.axhline(TARGETS["decode_roofline"].bound, color="#D55E00", label="target")
    middle = (_GROUP_WIDTH - width) / 2
    axes.set_xticks([place + middle for place in range(len(batches))], [str(b) for b in batches])
    axes.set_xlabel("batch")
    axes.set_ylabel("weights and KV read / copy bandwidth")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)

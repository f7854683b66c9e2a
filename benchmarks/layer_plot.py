"""On by off as a picture: what becomes of the time to each token when layers are streamed."""

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.layer_report import FIGURES, LayerReport

# Okabe and Ito's colours, distinct for colour-blind readers, and a mark of its own for each.
_LOOKS = (
    ("to the first token", "#000000", "|"),
    ("to the second token", "#0072B2", "o"),
    ("between the two", "#D55E00", "s"),
)
_STEP = 0.2  # between the figures of one row


def plot_layers(report: LayerReport, path: Path) -> None:
    """A row for each load of each lane. Lines go from the least to the most."""
    rows = report.rows()
    figure = Figure(figsize=(9, 1.8 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, ((label, colour, mark), each) in enumerate(zip(_LOOKS, FIGURES, strict=True)):
        spreads = [report.on_by_off(lane, cell, each) for lane, cell in rows]
        axes.errorbar(
            [spread.median for spread in spreads],
            [row + (place - 1) * _STEP for row in range(len(rows))],
            xerr=(
                [spread.median - spread.least for spread in spreads],
                [spread.most - spread.median for spread in spreads],
            ),
            color=colour,
            marker=mark,
            markersize=10 if mark == "|" else 5,
            markeredgewidth=2.5 if mark == "|" else 1,
            linestyle="",
            elinewidth=1,
            label=label,
        )
    names = [f"{lane}: {cell.num_at_once} × {cell.num_tokens:,} tokens" for lane, cell in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axvline(1, color="#999999", linestyle="--", linewidth=1)
    axes.set_xlabel("time with layers streamed, by time without: left of 1 streaming is faster")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"KV layer by layer, beside whole\n{report.machine}", fontsize=10)
    figure.savefig(path, dpi=130)

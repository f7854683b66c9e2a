"""On by off as a picture: what becomes of the first token and of CPU when KV is kept."""

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.prefix_report import FIGURES, PrefixReport

# Okabe and Ito's colours, distinct for colour-blind readers, and a mark of its own for each.
_LOOKS = (("to the first token", "#0072B2", "o"), ("CPU of the workers", "#D55E00", "s"))
_STEP = 0.22  # between the figures of one row


def plot_prefixes(report: PrefixReport, path: Path) -> None:
    """A row for each load of each side. Lines go from the least to the most."""
    rows = report.rows()
    figure = Figure(figsize=(9, 1.8 + 0.36 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, ((label, colour, mark), each) in enumerate(zip(_LOOKS, FIGURES, strict=True)):
        spreads = [report.on_by_off(side, cell, each) for side, cell in rows]
        axes.errorbar(
            [spread.median for spread in spreads],
            [row + (place - 0.5) * _STEP for row in range(len(rows))],
            xerr=(
                [spread.median - spread.least for spread in spreads],
                [spread.most - spread.median for spread in spreads],
            ),
            color=colour,
            marker=mark,
            markersize=5,
            linestyle="",
            elinewidth=1,
            label=label,
        )
    axes.set_yticks(range(len(rows)), [f"{side}, {cell.name}" for side, cell in rows])
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axvline(1, color="#999999", linestyle="--", linewidth=1)
    axes.set_xlabel("with the prefix cache, by without: left of 1 it gains")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(f"KV of prompts' beginnings, kept or not\n{report.machine}", fontsize=10)
    figure.savefig(path, dpi=130)

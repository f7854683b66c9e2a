"""What becomes of requests at each load, and how long answers and refusals take."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from benchmarks.overload import Load

# Okabe and Ito's colours, distinct for colour-blind readers.
_GOOD, _LATE, _REFUSED, _LOST = "#0072B2", "#E69F00", "#BBBBBB", "#D55E00"


def plot_overload(
    loads: Sequence["Load"], promised: float, patience_s: float, machine: str, path: Path
) -> None:
    """Loads in the order in which they were applied. `promised` is a share of the peak.

    Each is called by what was offered, as a multiple of the best goodput where there was any.
    """
    figure = Figure(figsize=(11, 4), layout="constrained")
    rates, times = figure.subplots(1, 2)
    peak = max(load.goodput for load in loads)
    names = [f"{load.offered / peak:.1f} ×" if peak else f"{load.offered:.1f}/s" for load in loads]
    names[-1] += "\nagain"
    _draw_rates(rates, loads, promised)
    _draw_times(times, loads, patience_s)
    for axes in (rates, times):
        axes.set_xticks(range(len(loads)), names)
        axes.set_xlabel("offered load, of the best goodput" if peak else "offered load")
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=9, frameon=False)
    figure.suptitle(machine, fontsize=10)
    figure.savefig(path, dpi=130)


def _draw_rates(axes: Axes, loads: Sequence["Load"], promised: float) -> None:
    below = [0.0] * len(loads)
    for label, colour, rates in (
        ("good", _GOOD, [load.goodput for load in loads]),
        ("too late", _LATE, [load.answered - load.goodput for load in loads]),
        ("refused", _REFUSED, [load.refused / load.until_s for load in loads]),
        ("lost", _LOST, [load.lost / load.until_s for load in loads]),
    ):
        axes.bar(range(len(loads)), rates, 0.6, bottom=below, color=colour, label=label)
        below = [low + rate for low, rate in zip(below, rates, strict=True)]
    least = promised * max(load.goodput for load in loads)
    axes.axhline(least, color="black", linestyle="--", label=f"{promised:.0%} of the best goodput")
    axes.set_title("what became of requests", fontsize=10, loc="left")
    axes.set_ylabel("requests per second")


def _draw_times(axes: Axes, loads: Sequence["Load"], patience_s: float) -> None:
    for label, style, colour, values in (
        ("first token, p50", "o-", _GOOD, [load.first_token_p50_s for load in loads]),
        ("first token, p99", "o:", _GOOD, [load.first_token_p99_s for load in loads]),
        ("a refusal, p99", "s-", "#777777", [load.refusal_p99_s for load in loads]),
    ):
        points = [(at, each * 1e3) for at, each in enumerate(values) if each is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, color=colour, label=label)
    axes.axhline(patience_s * 1e3, color="black", linestyle="--", label="too late")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_title("how long it took, at the client", fontsize=10, loc="left")
    axes.set_ylabel("ms")

"""The comparison of engines as a picture: one row per model, one panel per phase."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.engine_report import EngineReport
from benchmarks.engine_rounds import Outcome
from benchmarks.order_statistics import Spread

# Okabe and Ito's colours, distinct for colour-blind readers; ours is the strong one.
COLOURS = ("#0072B2", "#E69F00", "#999999", "#CC79A7")
_BAR_HEIGHT = 0.7


def plot_engines(report: EngineReport, path: Path) -> None:
    outcomes = report.outcomes
    num_phases = max(len(outcome.speeds) for outcome in outcomes.values())
    num_engines = max(len(outcome.versions) for outcome in outcomes.values())
    figure = Figure(
        figsize=(2.6 * num_phases + 1.4, (0.34 * num_engines + 1.1) * len(outcomes) + 0.9),
        layout="constrained",
    )
    grid = figure.subplots(len(outcomes), num_phases, squeeze=False)
    for row, (title, outcome) in zip(grid, outcomes.items(), strict=True):
        for axes, phase in zip(row, outcome.speeds, strict=True):
            _draw_phase(axes, outcome, phase)
        row[0].set_ylabel(title, fontweight="bold")
        row[0].set_yticks(range(len(outcome.versions)), list(outcome.versions))
    for axes in grid[-1]:
        axes.set_xlabel("tokens/s")
    figure.suptitle(
        f"Engines side by side, {report.threads} core(s) each: median of "
        f"{report.num_rounds} rounds, whiskers from least to most",
        fontsize=12,
    )
    figure.savefig(path, dpi=150)


def _draw_phase(axes: Axes, outcome: Outcome, phase: str) -> None:
    spreads = [
        Spread.of(speed.wall for speed in speeds) for speeds in outcome.speeds[phase].values()
    ]
    rows = range(len(spreads))
    medians = [spread.median for spread in spreads]
    whiskers = [
        [spread.median - spread.least for spread in spreads],
        [spread.most - spread.median for spread in spreads],
    ]
    axes.barh(rows, medians, _BAR_HEIGHT, color=COLOURS[: len(spreads)])
    axes.errorbar(medians, rows, xerr=whiskers, fmt="none", ecolor="#333333", capsize=3)
    longest = max(spread.most for spread in spreads)
    for row, spread in zip(rows, spreads, strict=True):
        label = f"{spread.median:,.0f}" if spread.median >= 100 else f"{spread.median:.1f}"
        axes.text(spread.most + 0.03 * longest, row, label, va="center", fontsize=9)
    axes.set_xlim(0, 1.3 * longest)  # room for the numbers
    axes.set_title(phase, fontsize=10)
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.locator_params(axis="x", nbins=4)
    axes.spines[["top", "right"]].set_visible(False)

"""What the ways of being known cost, as a picture: over numbers of workers."""

from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from benchmarks.order_statistics import Spread
from benchmarks.registry_report import OURS, RegistryReport, Sample

# Okabe and Ito's colours, distinct for colour-blind readers, and a mark of its own for each.
_LOOKS = {
    OURS: ("#0072B2", "o"),
    "embedded": ("#009E73", "^"),
    "etcd3": ("#D55E00", "s"),
    "polling": ("#E69F00", "D"),
}
_PANELS: tuple[tuple[str, str, Callable[[Sample], float]], ...] = (
    ("put to seen, p50", "ms", lambda each: each.seen_p50_ms),
    ("put to seen, p99", "ms", lambda each: each.seen_p99_ms),
    ("CPU of the registry, quiet", "% of a core", lambda each: each.quiet_server),
    ("CPU of a watcher, quiet", "% of a core", lambda each: each.quiet_watcher),
    ("CPU of a watcher, registry down", "% of a core", lambda each: each.down_watcher),
    ("after a restart until all is seen", "s", lambda each: each.back_s),
)
_COLUMNS = 3


def plot_registries(report: RegistryReport, path: Path) -> None:
    """A panel per measure; both scales are logarithmic."""
    figure = Figure(figsize=(4.3 * _COLUMNS, 7), layout="constrained")
    panels = figure.subplots(len(_PANELS) // _COLUMNS, _COLUMNS, squeeze=False)
    for axes, (title, unit, value) in zip(panels.flat, _PANELS, strict=True):
        _draw(axes, report, value)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_ylabel(unit)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        f"Medians of {max(each.round for each in report.samples)} rounds; less is better\n"
        f"{report.machine}",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)


def _draw(axes: Axes, report: RegistryReport, value: Callable[[Sample], float]) -> None:
    for way in report.notes:
        points = [
            (workers, Spread.of(map(value, samples)).median)
            for workers in report.sizes()
            if (samples := report.of(way, workers))
        ]
        shown = [each for each in points if 0 < each[1] < float("inf")]
        if not shown:
            continue
        colour, mark = _LOOKS[way]
        width = 2.6 if way == OURS else 1.3
        axes.plot(*zip(*shown, strict=True), color=colour, marker=mark, linewidth=width, label=way)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(report.sizes()))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel("workers")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)

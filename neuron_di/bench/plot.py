"""A run's figures as a picture: tails of the times, times over the run, what became of requests."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_di.bench.document import Curve, Document, EndpointReport, Ratio
from neuron_di.errors import ConfigError, NeuronDiError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, distinct for colour-blind readers.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_SLOW, _FAILED = "#F0C75E", "#B22222"
_TICKS = (0, 50, 90, 99, 99.9, 99.99)
_LOG_FROM = 30  # times the smallest value: from there on a linear axis shows only the largest
_TITLE_PAD = 19  # room for the legend
_WIDE = 6  # ratios so far apart need no ticks between powers of 2
_DPI = 130


def require_plot(path: Path) -> None:
    """ConfigError when --plot cannot work: before the run, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib: pip install '.[plot]' in neuron-di's folder"
        ) from None
    from matplotlib.backend_bases import FigureCanvasBase

    kind = path.suffix[1:].lower()
    if kind and kind not in FigureCanvasBase.get_supported_filetypes():
        raise ConfigError(f"--plot {path}: a picture is a .png, .svg or .pdf")


def plot(document: Document, path: Path) -> None:
    """Write the picture; the file's ending says of which kind. NeuronDiError when it cannot be."""
    require_plot(path)
    from matplotlib.figure import Figure

    rows = 3 if document.ratios else 2
    figure = Figure(figsize=(11, 3.6 * rows + 0.5), layout="constrained")
    grid = figure.add_gridspec(rows, 2)
    names = {each.name: _COLOURS[at % len(_COLOURS)] for at, each in enumerate(document.endpoints)}
    panels: list[Any] = [figure.add_subplot(grid[at // 2, at % 2]) for at in range(4)]
    ttft = [(each.name, each.ttft_curve) for each in document.endpoints]
    itl = [(each.name, each.itl_curve) for each in document.endpoints]
    since = "sending" if document.loop == "closed" else "intended sending"
    _tail(panels[0], ttft, names, document.slo_ttft_ms, f"TTFT from {since}", "requests")
    _tail(panels[1], itl, names, document.slo_itl_ms, "ITL, each gap", "gaps")
    _over_time(panels[2], document.endpoints, names, document.slo_ttft_ms)
    _fates(panels[3], document)
    if document.ratios:
        _ratios(figure.add_subplot(grid[2, :]), document.ratios, names)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title(document), fontsize=10)
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise NeuronDiError(f"--plot {path}: {error.strerror or error}") from None


def _title(document: Document) -> str:
    where = "   ".join(f"{each.name}: {each.url} {each.model}" for each in document.endpoints)
    return f"{document.load}; {document.lengths}\n{where}".replace("$", r"\$")


def _tail(
    axes: "Axes",
    curves: Sequence[tuple[str, Curve]],
    colours: dict[str, str],
    bound_ms: float | None,
    title: str,
    of_what: str,
) -> None:
    """Percentiles, stretched towards 100: equal steps are ten times fewer of the requests."""
    values = [value for _, curve in curves for _, value in curve]
    for name, curve in curves:
        places = [_place(percent) for percent, _ in curve]
        axes.plot(places, [value for _, value in curve], color=colours[name], label=name, lw=1.8)
    if bound_ms is not None:
        axes.axhline(bound_ms, color="black", ls="--", lw=1, label=f"SLO {bound_ms:g} ms")
    last = max((curve[-1][0] for _, curve in curves if curve), default=0)
    ticks = [tick for tick in _TICKS if tick <= last]
    axes.set_xticks([_place(tick) for tick in ticks], [f"{tick:g}" for tick in ticks])
    axes.set_xlabel(f"percentile of {of_what}")
    low = _scale(axes, [*values, *([bound_ms] if bound_ms else [])])
    _dress(
        axes,
        title + (f"; below {low:.2g} ms not shown" if low > min(values, default=0) else ""),
        "ms",
    )
    if len(curves) > 1 or bound_ms is not None:
        _legend(axes)


def _place(percent: float) -> float:
    """Where a percentile is drawn: 0 at 0, 1 at 90, 2 at 99, 3 at 99.9. Never asked for 100."""
    from math import log10

    return -log10(max(1e-6, 1 - percent / 100))


def _scale(axes: "Axes", values: Sequence[float]) -> float:
    """From 0, or logarithmic where values are far apart. Returns where the axis begins."""
    above = [value for value in values if value > 0]
    middle = sorted(above)[len(above) // 2] if above else 1.0
    if above and max(above) > _LOG_FROM * middle:
        axes.set_yscale("log")
        # Gaps between tokens of one packet are nearly 0, and would take most of the room.
        low = max(min(above), middle / 20) * 0.9
        axes.set_ylim(bottom=low)
        axes.yaxis.set_major_formatter("{x:,g}")
        return low
    axes.set_ylim(bottom=0, top=max(above, default=1.0) * 1.08)
    return 0.0


def _over_time(
    axes: "Axes",
    endpoints: Sequence[EndpointReport],
    colours: dict[str, str],
    bound_ms: float | None,
) -> None:
    values: list[float] = []
    failed_at: list[float] = []
    for each in endpoints:
        rows = each.requests
        points = [
            (at_s, ms)
            for at_s, ms, ending in zip(rows.intended_s, rows.ttft_ms, rows.ending, strict=True)
            if ending == "ok" and ms is not None
        ]
        failed_at += [
            at_s
            for at_s, ending in zip(rows.intended_s, rows.ending, strict=True)
            if ending not in ("ok", "interrupted")
        ]
        size = 14 if len(points) < 500 else 5
        axes.scatter(
            [at for at, _ in points],
            [ms for _, ms in points],
            s=size,
            color=colours[each.name],
            alpha=0.7,
            linewidths=0,
            label=each.name,
        )
        values += [ms for _, ms in points]
    _scale(axes, values)
    if failed_at:
        low = axes.get_ylim()[0]
        axes.scatter(failed_at, [low] * len(failed_at), marker="x", s=24, color=_FAILED,
                     label="failed", clip_on=False, zorder=3)  # fmt: skip
    if bound_ms is not None and axes.get_ylim()[1] > bound_ms:
        axes.axhline(bound_ms, color="black", ls="--", lw=1)
    axes.margins(x=0.02)
    axes.set_xlabel("seconds into the run")
    _dress(axes, "TTFT of each request", "ms")
    if len(endpoints) > 1 or failed_at:
        _legend(axes, markerscale=1.3)


def _fates(axes: "Axes", document: Document) -> None:
    """Good, too slow and failed: shares of all requests, and of each class of prompt."""
    bars = []
    for each in document.endpoints:
        lead = f"{each.name}: " if len(document.endpoints) > 1 else ""
        bars.append((f"{lead}all", each.figures))
        if sum(one.figures.num > 0 for one in each.classes) > 1:
            bars += [(f"{lead}{one.name}", one.figures) for one in each.classes if one.figures.num]
    for at, (_, figures) in enumerate(bars):
        if not figures.num:
            continue
        num_slow = figures.num_ok - figures.num_good
        parts = [(figures.num_good, _COLOURS[2]), (num_slow, _SLOW), (figures.num_failed, _FAILED)]
        left = 0.0
        for num, colour in parts:
            share = 100 * num / figures.num
            axes.barh(at, share, 0.62, left=left, color=colour)
            if share >= 8:
                axes.text(left + share / 2, at, f"{num:,}", ha="center", va="center", fontsize=8)
            left += share
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.set_ylim(max(len(bars), 3) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.set_xlabel("percent of requests")
    handles = [axes.barh(0, 0, color=colour) for colour in (_COLOURS[2], _SLOW, _FAILED)]
    labels = ("good" if document.slo else "ok", "too slow", "failed")
    chosen = [0, 1, 2] if document.slo else [0, 2]
    _legend(axes, [handles[at] for at in chosen], [labels[at] for at in chosen])
    axes.set_title("what became of requests", fontsize=10, loc="left", pad=_TITLE_PAD)


def _ratios(axes: "Axes", ratios: Sequence[Ratio], colours: dict[str, str]) -> None:
    """Each slice a dot, on a logarithmic axis: twice and half are as far from 1."""
    from matplotlib.ticker import LogLocator, NullFormatter

    figures = list(dict.fromkeys(each.figure for each in ratios))
    names = list(dict.fromkeys(each.name for each in ratios))
    for each in ratios:
        at = figures.index(each.figure) + 0.22 * (names.index(each.name) - (len(names) - 1) / 2)
        values = [value for value in each.by_slice if value]
        label = f"{each.name} / {each.over}" if each.figure == figures[0] else None
        axes.plot([at, at], [min(values, default=1), max(values, default=1)],
                  color=colours[each.name], lw=1.2, alpha=0.6)  # fmt: skip
        axes.scatter([at] * len(values), values, color=colours[each.name], s=16, alpha=0.7)
        if each.median > 0:
            axes.scatter([at], [each.median], color=colours[each.name], marker="_", s=420, lw=2.2,
                         label=label)  # fmt: skip
            axes.annotate(f"{each.median:.2f}", (at, each.median), xytext=(14, 0),
                          textcoords="offset points", va="center", fontsize=8, zorder=4,
                          bbox={"fc": "white", "ec": "none", "pad": 0.8})  # fmt: skip
    axes.axhline(1, color="black", lw=1)
    axes.set_yscale("log", base=2)
    low, high = axes.get_ylim()
    for each in ratios:  # a logarithmic axis has no 0: such slices are arrows at its end
        num_zero = each.by_slice.count(0)
        if num_zero:
            axes.scatter([figures.index(each.figure)], [low], marker="v", s=40, clip_on=False,
                         color=colours[each.name])  # fmt: skip
            axes.annotate(f"0 in {num_zero}", (figures.index(each.figure), low), xytext=(8, 2),
                          textcoords="offset points", fontsize=8)  # fmt: skip
    subs = (1.0,) if high > _WIDE * low else (1.0, 1.25, 1.5, 1.75)
    axes.yaxis.set_major_locator(LogLocator(base=2, subs=subs))
    axes.yaxis.set_major_formatter("{x:.3g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    better = {
        each.figure: "more is better" if each.more_is_better else "less is better"
        for each in ratios
    }
    axes.set_xticks(range(len(figures)), [f"{figure}\n{better[figure]}" for figure in figures])
    axes.set_xlim(-0.5, len(figures) - 0.5)
    axes.spines[["top", "right"]].set_visible(False)
    _dress(axes, "ratio in each slice (dots) and their median (bar)", "ratio")
    _legend(axes, markerscale=0.4)


def _legend(axes: "Axes", *what: Any, markerscale: float = 1.0) -> None:
    """Above the picture, where it hides nothing."""
    if not what and not axes.get_legend_handles_labels()[0]:
        return  # as of ratios that are all 0
    axes.legend(
        *what,
        fontsize=8,
        frameon=False,
        loc="lower left",
        bbox_to_anchor=(-0.015, 0.975),
        ncols=4,
        columnspacing=1.2,
        markerscale=markerscale,
    )


def _dress(axes: "Axes", title: str, unit: str) -> None:
    axes.set_title(title, fontsize=10, loc="left", pad=_TITLE_PAD)
    axes.set_ylabel(unit)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)

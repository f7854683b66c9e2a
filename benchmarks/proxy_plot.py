"""What the proxies cost, as a picture: over numbers of streams, and over lengths of prompts."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from benchmarks.order_statistics import Spread
from benchmarks.proxy_prompts import CPU, FIRST_TOKEN, Measure, added, prompt_groups
from benchmarks.proxy_report import OURS, OURS_TWICE, Cell, ProxyReport, Sample

# Okabe and Ito's colours, distinct for colour-blind readers, and a mark of its own for each.
_LOOKS = {
    OURS: ("#0072B2", "o"),
    OURS_TWICE: ("#56B4E9", "P"),
    "sglang-router": ("#D55E00", "s"),
    "vllm-router": ("#E69F00", "D"),
    "vllm-demo": ("#CC79A7", "v"),
    "nginx": ("#009E73", "^"),
    "direct": ("#777777", "x"),
}
_COLUMNS = 4
_BY_STREAMS: tuple[tuple[str, str, Callable[[Sample], float]], ...] = (
    ("CPU per token", "µs", lambda each: each.cpu_us_per_token),
    ("travel of a token, p50", "ms", lambda each: each.travel_p50_ms),
    ("travel of a token, p99", "ms", lambda each: each.travel_p99_ms),
    ("request to first token, p50", "ms", lambda each: each.first_p50_ms),
)

Points = Callable[[str, Cell], Sequence[float]]  # a contender's values, one a round


def plot_proxies(report: ProxyReport, path: Path) -> None:
    """A row per reply length over streams, then one over prompts. Both scales are logarithmic."""
    cells = sorted(report.cells())
    shortest = min(cell.prompt_tokens for cell in cells)
    replies = sorted({cell.reply_tokens for cell in cells})
    figure = Figure(figsize=(4.3 * _COLUMNS, 3.5 * (len(replies) + 1)), layout="constrained")
    panels = figure.subplots(len(replies) + 1, _COLUMNS, squeeze=False)
    for row, reply in zip(panels, replies, strict=False):
        own = [c for c in cells if (c.reply_tokens, c.prompt_tokens) == (reply, shortest)]
        for axes, (name, unit, value) in zip(row, _BY_STREAMS, strict=True):
            _draw(axes, report, own, "streams", _values(report, value))
            _label(axes, f"{name}, answers of {reply}", "streams", unit)
    *by_prompt, last = panels[-1]
    _draw_prompts(report, by_prompt)
    longest = [c for c in cells if (c.reply_tokens, c.prompt_tokens) == (replies[-1], shortest)]
    _draw(last, report, longest, "streams", _values(report, lambda each: each.rss_mib))
    _label(last, f"resident memory, answers of {replies[-1]}", "streams", "MiB")
    handles, labels = panels[0][1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7, frameon=False)
    figure.suptitle(
        f"What a proxy costs: medians of {max(each.round for each in report.samples)} rounds; "
        f"prompts of {shortest:,} tokens unless said otherwise; less is better\n{report.machine}",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)


def _draw_prompts(report: ProxyReport, panels: Sequence[Axes]) -> None:
    """First token with fewest and most streams, then CPU, over prompts. Else nothing."""
    groups = prompt_groups(report)
    wanted: list[tuple[list[Cell], Measure]] = []
    if groups:
        wanted = [
            (cells, FIRST_TOKEN) for cells in dict.fromkeys(map(tuple, (groups[0], groups[-1])))
        ]
        wanted.append((groups[-1], CPU))
    for axes, (cells, measure) in zip(panels, wanted, strict=False):
        _draw(axes, report, cells, "prompt_tokens", lambda n, c, m=measure: added(report, n, c, m))
        streams = f"{cells[0].streams} stream{'s' * (cells[0].streams > 1)}"
        _label(axes, f"{measure.name}, above direct, {streams}", "prompt, tokens", "ms")
    for axes in panels[len(wanted) :]:
        axes.set_axis_off()


def _values(report: ProxyReport, value: Callable[[Sample], float]) -> Points:
    return lambda name, cell: [value(each) for each in report.of(name, cell)]


def _draw(
    axes: Axes, report: ProxyReport, cells: Sequence[Cell], across: str, points: Points
) -> None:
    for name in report.notes:
        medians = [
            (getattr(cell, across), Spread.of(values).median)
            for cell in cells
            if (values := points(name, cell))
        ]
        shown = [each for each in medians if 0 < each[1] < float("inf")]
        if not shown:
            continue
        colour, mark = _LOOKS[name]
        is_ours = name in (OURS, OURS_TWICE)
        axes.plot(
            *zip(*shown, strict=True),
            color=colour,
            marker=mark,
            markersize=5,
            linewidth=2.6 if is_ours else 1.3,
            zorder=3 if is_ours else 2,
            label=name,
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sorted({getattr(cell, across) for cell in cells})))
    axes.xaxis.set_minor_locator(NullLocator())


def _label(axes: Axes, title: str, across: str, unit: str) -> None:
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(across)
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)

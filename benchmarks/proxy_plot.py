"""CPU per token and travel over streams, the time to the first token over prompts."""

from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from benchmarks.order_statistics import Spread
from benchmarks.proxy_report import OURS, Cell, ProxyReport, Sample

# Okabe and Ito's colours, distinct for colour-blind readers.
_COLOURS = {
    OURS: "#0072B2",
    "sglang-router": "#D55E00",
    "vllm-router": "#E69F00",
    "vllm-demo": "#CC79A7",
    "nginx": "#009E73",
    "direct": "#777777",
}

Value = Callable[[Sample], float]


def plot_proxies(report: ProxyReport, path: Path) -> None:
    """A row per reply length (CPU, then travel), and one for prompts. Log scales throughout."""
    cells = sorted(report.cells())
    shortest = min(cell.prompt_tokens for cell in cells)
    replies = sorted({cell.reply_tokens for cell in cells})
    figure = Figure(figsize=(11, 3.6 * (len(replies) + 1)), layout="constrained")
    panels = figure.subplots(len(replies) + 1, 2, squeeze=False)
    for row, reply in zip(panels, replies, strict=False):
        own = [c for c in cells if (c.reply_tokens, c.prompt_tokens) == (reply, shortest)]
        title = f"answers of {reply} tokens"
        _draw(row[0], report, own, "streams", lambda s: s.cpu_us_per_token)
        _label(row[0], f"CPU per token, {title}", "streams", "µs")
        _draw(row[1], report, own, "streams", lambda s: s.travel_p50_ms, lambda s: s.travel_p99_ms)
        _label(row[1], f"travel of a token, p50 (p99 dotted), {title}", "streams", "ms")
    own = _prompt_cells(cells)
    _draw(panels[-1][0], report, own, "prompt_tokens", lambda s: s.first_p50_ms)
    _label(panels[-1][0], "request to first token, p50", "prompt, tokens", "ms")
    _draw(panels[-1][1], report, own, "prompt_tokens", lambda s: s.rss_mib)
    _label(panels[-1][1], "resident memory", "prompt, tokens", "MiB")
    handles, labels = panels[0][1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=150)


def _prompt_cells(cells: list[Cell]) -> list[Cell]:
    """The cells that differ in nothing but the prompt: as many as there are."""
    groups: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.streams, cell.reply_tokens), []).append(cell)
    return max(groups.values(), key=len)


def _draw(
    axes: Axes,
    report: ProxyReport,
    cells: list[Cell],
    across: str,
    value: Value,
    dotted: Value | None = None,
) -> None:
    for name in report.notes:
        for each, style in ((value, "-o"), (dotted, ":")):
            if each is None:
                continue
            points = [
                (getattr(cell, across), Spread.of(map(each, samples)).median)
                for cell in cells
                if (samples := report.of(name, cell))
            ]
            points = [point for point in points if 0 < point[1] < float("inf")]
            if points:
                label = name if style == "-o" else None
                axes.plot(*zip(*points, strict=True), style, color=_COLOURS[name], label=label)


def _label(axes: Axes, title: str, across: str, unit: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter("{x:,g}")
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(across)
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)

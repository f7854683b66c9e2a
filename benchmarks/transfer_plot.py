"""How fast each way moves KV, as a picture: a row per shape, memcpy is 1."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.transfer_report import (
    C_TCP,
    C_TWO_CORES,
    HANDOVER,
    SHM,
    TCP,
    TCP_TWO_CORES,
    TransferReport,
)

# Okabe and Ito's colours, distinct for colour-blind readers, and a mark of its own for each.
_LOOKS = {
    SHM: ("#0072B2", "o"),
    TCP: ("#0072B2", "^"),
    TCP_TWO_CORES: ("#56B4E9", "^"),
    C_TCP: ("#000000", "|"),
    C_TWO_CORES: ("#000000", "2"),
    "NIXL shm": ("#D55E00", "s"),
    "NIXL tcp": ("#D55E00", "v"),
    "Mooncake tcp": ("#E69F00", "D"),
}
_PANELS = (
    ("one host, shared memory", (SHM, "NIXL shm")),
    ("TCP over loopback", (TCP, TCP_TWO_CORES, C_TCP, C_TWO_CORES, "NIXL tcp", "Mooncake tcp")),
)
_STEP = 0.14  # between the ways of one row


def plot_transfers(report: TransferReport, path: Path) -> None:
    """Of a library's two ways the better one in each row. Lines go from the least to the most."""
    shapes = report.shapes()
    figure = Figure(figsize=(11, 1.9 + 0.55 * len(shapes)), layout="constrained")
    panels = figure.subplots(1, len(_PANELS), sharey=True, squeeze=False)[0]
    for axes, (title, kinds) in zip(panels, _PANELS, strict=True):
        _draw(axes, report, kinds)
        axes.set_title(title, fontsize=11, loc="left")
        axes.set_xlabel("speed, memcpy of as many bytes = 1")
    panels[0].set_yticks(range(len(shapes)), shapes)
    panels[0].invert_yaxis()
    found = [axes.get_legend_handles_labels() for axes in panels]
    figure.legend(
        [handle for handles, _ in found for handle in handles],
        [label for _, labels in found for label in labels],
        loc="outside lower center",
        ncols=7,
        frameon=False,
    )
    figure.suptitle(
        "KV from one process to another: ours in blue, more is better\n"
        f"{_hand_overs(report)}{report.machine}",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)


def _draw(axes: Axes, report: TransferReport, kinds: tuple[str, ...]) -> None:
    shown = [kind for kind in kinds if any(_way(report, kind, s) for s in report.shapes())]
    for place, kind in enumerate(shown):
        colour, mark = _LOOKS[kind]
        rows, middles, lows, highs = [], [], [], []
        for row, shape in enumerate(report.shapes()):
            way = _way(report, kind, shape)
            spread = report.spread(way, shape, lambda each: each.of_memcpy) if way else None
            if spread is not None:
                rows.append(row + (place - (len(shown) - 1) / 2) * _STEP)
                middles.append(spread.median)
                lows.append(spread.median - spread.least)
                highs.append(spread.most - spread.median)
        axes.errorbar(
            middles,
            rows,
            xerr=(lows, highs),
            color=colour,
            marker=mark,
            markersize=9 if mark in "|2" else 6,
            markeredgewidth=2.5 if mark in "|2" else 1,
            linestyle="",
            elinewidth=1,
            label=kind,
        )
    axes.axvline(1, color="#999999", linestyle="--", linewidth=1)
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _way(report: TransferReport, kind: str, shape: str) -> str | None:
    return kind if report.of(kind, shape) else report.best(kind, shape)


def _hand_overs(report: TransferReport) -> str:
    """What no picture shows: no byte moves."""
    times = [report.spread(HANDOVER, s, lambda each: each.wall_s * 1e3) for s in report.shapes()]
    found = [each.median for each in times if each is not None]
    if not found:
        return ""
    return f"handover moves no bytes: {min(found):.2f} to {max(found):.2f} ms, whatever the size\n"

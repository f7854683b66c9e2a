"""ITL over time in both set-ups, the arrivals marked."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.interference_report import PROMISED_RATIO, Observation, RoundSummary

# Okabe and Ito's colours, distinct for colour-blind readers.
_GAP, _PREFILL, _LIMIT = "#0072B2", "#E69F00", "#D55E00"
_FLOOR_MEDIANS = 0.2


def plot_interference(observations: dict[str, Observation], scene: str, path: Path) -> None:
    """One panel per set-up on shared axes; log scale, because the two differ by a lot."""
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    panels = figure.subplots(len(observations), 1, sharex=True, sharey=True)
    for axes, (name, observation) in zip(panels, observations.items(), strict=True):
        _draw(axes, name, observation)
    # Below are tokens that the client read together: the gap before them was the long one.
    summaries = [RoundSummary.of(observation) for observation in observations.values()]
    floor_s = _FLOOR_MEDIANS * min(summary.median_s for summary in summaries)
    longest_s = max(max(observation.durations()) for observation in observations.values())
    panels[0].set_ylim(floor_s * 1000, 2 * longest_s * 1000)
    panels[-1].set_xlabel("seconds since all streams were running")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(scene, fontsize=12)
    figure.savefig(path, dpi=150)


def _draw(axes: Axes, name: str, observation: Observation) -> None:
    summary = RoundSummary.of(observation)
    for number, arrival in enumerate(observation.arrivals):
        axes.axvspan(
            arrival.sent_s,
            arrival.first_token_s,
            color=_PREFILL,
            alpha=0.25,
            linewidth=0,
            label="a prompt was sent, until its first token" if number == 0 else None,
        )
    starts_s = [end_s - duration_s for end_s, duration_s in observation.gaps]
    ends_s = [end_s for end_s, _ in observation.gaps]
    gaps_ms = [duration_s * 1000 for _, duration_s in observation.gaps]
    axes.hlines(
        gaps_ms,
        starts_s,
        ends_s,
        color=_GAP,
        linewidth=2.5,
        label="a gap between two tokens of a stream, as long as it lasted",
    )
    axes.axhline(
        PROMISED_RATIO * summary.median_s * 1000,
        color=_LIMIT,
        linestyle="--",
        label=f"{PROMISED_RATIO:g} medians",
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("ITL, ms")
    axes.set_title(
        f"{name}: median {summary.median_s * 1000:.1f} ms, largest gap at an arrival "
        f"{max(summary.largest_s) * 1000:,.1f} ms",
        fontsize=11,
        loc="left",
    )
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)

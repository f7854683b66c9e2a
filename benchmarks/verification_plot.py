"""The share of TTFT that verification takes, as a picture."""

from pathlib import Path

from matplotlib.figure import Figure

# Okabe and Ito's colours, distinct for colour-blind readers.
_REQUEST, _LIMIT = "#0072B2", "#D55E00"


def plot_verification(shares: dict[str, list[float]], promised: float, path: Path) -> None:
    """One row of points per series, in per cent of TTFT, and the line that none may cross."""
    figure = Figure(figsize=(8, 1.4 + 0.45 * len(shares)), layout="constrained")
    axes = figure.subplots()
    for row, values in enumerate(shares.values()):
        axes.plot(values, [row] * len(values), "o", alpha=0.5, color=_REQUEST)
    axes.axvline(promised, color=_LIMIT, linestyle="--", label=f"promised: {promised:g} %")
    axes.set_yticks(range(len(shares)), list(shares))
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("digest and verification, % of TTFT")
    axes.set_title("What verified KV costs, one point per request")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)

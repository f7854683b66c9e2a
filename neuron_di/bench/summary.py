"""Counts a run's figures: of each endpoint, by class of prompt, by slice, and as ratios."""

from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuron_di.bench.document import (
    FORMAT,
    ClassReport,
    ClientReport,
    Document,
    EndpointReport,
    Failures,
    Figures,
    Ratio,
    RequestColumns,
    SliceReport,
)
from neuron_di.bench.lengths import Lengths
from neuron_di.bench.measured import ENDINGS, Columns, Measured
from neuron_di.bench.run import Run, Strain, Turn, turns_of
from neuron_di.bench.settings import Settings
from neuron_di.bench.slo import Slo, good
from neuron_di.bench.statistics import curve, summary
from neuron_di.version import __version__

CPU_SHARE_MAX = 0.8  # of a core; a client that uses more may be what is measured
LAG_MS_MAX = 10.0
STALL_MS_MAX = 50.0
PACKET_GAP_MS = 0.05  # a shorter gap is one between tokens that came in one packet
PACKET_SHARE_MAX = 0.1  # of gaps; from there on it is said
_INTERRUPTED = ENDINGS.index("interrupted")

Chosen = NDArray[np.bool_]


def summarize(run: Run) -> Document:
    """The run so far."""
    settings, plan = run.settings, run.plan
    begun_s = min((turn.begin_s for turn in run.turns), default=0.0)
    endpoints = [_endpoint_report(run, place, begun_s) for place in range(len(run.endpoints))]
    return Document(
        format=FORMAT,
        neuron_di=__version__,
        started=datetime.fromtimestamp(run.started_unix_s, UTC).isoformat(timespec="seconds"),
        is_interrupted=run.is_interrupted,
        loop=settings.loop,
        load=load_words(settings),
        lengths=lengths_words(settings),
        slo=settings.slo.words(),
        slo_ttft_ms=settings.slo.ttft_ms,
        slo_itl_ms=settings.slo.itl_ms,
        settings=_plain_settings(settings),
        num_left_out=plan.num_left_out,
        client=_client_report(run.strain, endpoints),
        endpoints=endpoints,
        ratios=ratios(endpoints),
    )


def load_words(settings: Settings) -> str:
    """How requests are sent, as in `open loop, 4 requests/s, poisson`."""
    cap = "" if settings.concurrency is None else f", at most {settings.concurrency:,} at a time"
    if settings.loop == "closed":
        return f"closed loop, {settings.concurrency:,} at a time"
    if settings.rate is None:
        scale = f", times x {settings.time_scale:g}" if settings.time_scale != 1 else ""
        return f"open loop, arrivals of the trace{scale}{cap}"
    if settings.rate == float("inf"):
        return f"open loop, all at once{cap}"
    shape = f" {settings.burstiness:g}" if settings.arrivals == "burst" else ""
    return f"open loop, {settings.rate:g} requests/s, {settings.arrivals}{shape}{cap}"


def lengths_words(settings: Settings) -> str:
    """How long prompts and answers are."""
    if settings.trace is not None:
        scale = f", tokens x {settings.token_scale:g}" if settings.token_scale != 1 else ""
        return f"lengths of {settings.trace.name}{scale}"
    return f"{settings.input_tokens.words()} tokens in, {settings.output_tokens.words()} out"


def figures_of(columns: Columns, chosen: Chosen, is_good: Chosen) -> Figures:
    """Of the chosen requests. Those that were interrupted count for nothing."""
    counted = chosen & (columns.ending != _INTERRUPTED)
    ok = counted & columns.is_ok
    return Figures(
        num_ok=int(ok.sum()),
        num_failed=int((counted & ~ok).sum()),
        num_good=int((counted & is_good).sum()),
        ttft_ms=summary(columns.ttft_s[ok], times=1e3),
        itl_ms=summary(columns.gaps_of(ok), times=1e3),
        tpot_ms=summary(columns.tpot_s[ok], times=1e3),
        e2e_ms=summary(columns.e2e_s[ok], times=1e3),
    )


def _endpoint_report(run: Run, place: int, begun_s: float) -> EndpointReport:
    endpoint, measured, slo = run.endpoints[place], run.measured[place], run.settings.slo
    columns = measured.columns()
    is_good, ok = good(columns, slo), columns.is_ok
    turns = turns_of(run.turns, place)
    wall_s = sum(turn.end_s - turn.begin_s for turn in turns) or float("inf")
    num_in, num_out = int(columns.prompt_tokens[ok].sum()), int(columns.output_tokens[ok].sum())
    if not endpoint.by_usage:
        num_in = int(columns.planned_tokens[ok].sum())
    is_closed = run.plan.at_s is None
    everyone = np.ones(len(ok), bool)
    return EndpointReport(
        name=endpoint.name,
        url=endpoint.url,
        model=endpoint.model,
        tokens_by="usage" if endpoint.by_usage else "chunks",
        prompts_of="token ids" if endpoint.prompts_are_ids else "words",
        notes=[*endpoint.notes, *_chunk_notes(columns, by_usage=endpoint.by_usage)],
        wall_s=0.0 if wall_s == float("inf") else wall_s,
        most_open=max((turn.most_open for turn in turns), default=0),
        num_interrupted=measured.counts["interrupted"],
        num_reconnects=endpoint.client.num_reconnects,
        failures=_failures(measured),
        figures=figures_of(columns, everyone, is_good),
        ttft_from_sent_ms=None
        if is_closed
        else summary((columns.first_s - columns.sent_s)[ok], times=1e3),
        e2e_from_sent_ms=None
        if is_closed
        else summary((columns.last_s - columns.sent_s)[ok], times=1e3),
        lag_ms=summary(columns.lag_s, times=1e3),
        prompt_tokens=num_in,
        output_tokens=num_out,
        requests_per_s=int(ok.sum()) / wall_s,
        output_tokens_per_s=num_out / wall_s,
        total_tokens_per_s=(num_in + num_out) / wall_s,
        goodput_per_s=int(is_good.sum()) / wall_s,
        classes=_classes(columns, is_good, run.settings.class_bounds),
        slices=[_slice_report(columns, is_good, turn, begun_s) for turn in turns],
        ttft_curve=curve(columns.ttft_s[ok], times=1e3),
        itl_curve=curve(columns.gaps_of(ok), times=1e3),
        requests=_request_columns(columns, is_good, begun_s),
    )


def _failures(measured: Measured) -> dict[str, Failures]:
    return {
        ending: Failures(measured.counts[ending], measured.examples.get(ending, ""))
        for ending in ENDINGS
        if ending not in ("ok", "interrupted") and measured.counts[ending]
    }


def _chunk_notes(columns: Columns, *, by_usage: bool) -> list[str]:
    ok = columns.is_ok
    num_tokens, num_chunks = int(columns.output_tokens[ok].sum()), int(columns.num_chunks[ok].sum())
    gaps_s = columns.gaps_of(ok)
    share = float((gaps_s < PACKET_GAP_MS / 1e3).mean()) if len(gaps_s) else 0.0
    notes = []
    if share > PACKET_SHARE_MAX:
        notes = [f"{share:.0%} of tokens came in one packet with the one before: gaps of nearly 0"]
    if not by_usage or num_chunks == 0 or abs(num_tokens / num_chunks - 1) < 0.02:
        return notes
    return [
        *notes,
        f"its chunks hold {num_tokens / num_chunks:.2f} tokens each: ITL is between chunks",
    ]


def _classes(columns: Columns, is_good: Chosen, bounds: tuple[int, int]) -> list[ClassReport]:
    edges = (("short", 0, bounds[0]), ("medium", *bounds), ("long", bounds[1], None))
    tokens = columns.planned_tokens
    reports = []
    for name, least, below in edges:
        chosen = (tokens >= least) & (tokens < (below or np.inf))
        figures = figures_of(columns, chosen, is_good)
        reports.append(ClassReport(name=name, least=least, below=below, figures=figures))
    return reports


def _slice_report(columns: Columns, is_good: Chosen, turn: Turn, begun_s: float) -> SliceReport:
    chosen = columns.slice_index == turn.slice_index
    wall_s = max(turn.end_s - turn.begin_s, 1e-9)
    return SliceReport(
        index=turn.slice_index,
        begin_s=turn.begin_s - begun_s,
        wall_s=wall_s,
        output_tokens_per_s=int(columns.output_tokens[chosen & columns.is_ok].sum()) / wall_s,
        goodput_per_s=int((chosen & is_good).sum()) / wall_s,
        figures=figures_of(columns, chosen, is_good),
    )


def _request_columns(columns: Columns, is_good: Chosen, begun_s: float) -> RequestColumns:
    def milliseconds(values_s: NDArray[np.float64]) -> list[float | None]:
        return [None if np.isnan(value) else round(value * 1e3, 3) for value in values_s.tolist()]

    return RequestColumns(
        index=columns.index.tolist(),
        ending=[ENDINGS[ending] for ending in columns.ending.tolist()],
        prompt_tokens=columns.prompt_tokens.tolist(),
        output_tokens=columns.output_tokens.tolist(),
        intended_s=np.round(columns.intended_s - begun_s, 6).tolist(),
        sent_s=np.round(columns.sent_s - begun_s, 6).tolist(),
        ttft_ms=milliseconds(columns.ttft_s),
        e2e_ms=milliseconds(columns.e2e_s),
        is_good=is_good.tolist(),
    )


def ratios(endpoints: list[EndpointReport]) -> list[Ratio]:
    """Each endpoint over the first one, for slices that both have done."""
    found = []
    for other in endpoints[1:]:
        firsts = {each.index: each for each in endpoints[0].slices}
        pairs = [(firsts[each.index], each) for each in other.slices if each.index in firsts]
        for figure, more_is_better in _COMPARED:
            by_slice = [
                _ratio(figure, first, second) for first, second in sorted(pairs, key=_index)
            ]
            values = [each for each in by_slice if each is not None]
            if values:
                found.append(
                    Ratio(
                        figure=figure,
                        name=other.name,
                        over=endpoints[0].name,
                        by_slice=by_slice,
                        median=median(values),
                        least=min(values),
                        most=max(values),
                        more_is_better=more_is_better,
                    )
                )
    return found


_COMPARED = (
    ("TTFT p50", False),
    ("TTFT p99", False),
    ("ITL p50", False),
    ("ITL p99", False),
    ("E2E p50", False),
    ("output tokens/s", True),
    ("goodput", True),
)


def _index(pair: tuple[SliceReport, SliceReport]) -> int:
    return pair[0].index


def _ratio(figure: str, first: SliceReport, second: SliceReport) -> float | None:
    over, value = _value(figure, first), _value(figure, second)
    if not over or value is None or (figure == "ITL p50" and over < PACKET_GAP_MS):
        return None
    return value / over


def _value(figure: str, report: SliceReport) -> float | None:
    if figure == "output tokens/s":
        return report.output_tokens_per_s
    if figure == "goodput":
        return report.goodput_per_s
    name, _, percentile = figure.partition(" ")
    found = getattr(report.figures, f"{name.lower()}_ms")
    value: float | None = None if found is None else getattr(found, percentile)
    return value


def _client_report(strain: Strain, endpoints: list[EndpointReport]) -> ClientReport:
    cpu_share = strain.cpu_s / strain.wall_s if strain.wall_s else 0.0
    stall_ms = strain.stall_s * 1e3
    warnings = [
        f"the client sent to {each.name} up to {each.lag_ms.max:,.0f} ms late (p99 "
        f"{each.lag_ms.p99:,.0f} ms): times from the intended moment have that in them"
        for each in endpoints
        if each.lag_ms is not None and each.lag_ms.p99 > LAG_MS_MAX
    ]
    if cpu_share > CPU_SHARE_MAX:
        warnings.append(
            f"the client used {cpu_share:.0%} of a core: it may be what was measured. Mend: "
            "a lower rate, or several clients"
        )
    if stall_ms > STALL_MS_MAX:
        warnings.append(
            f"the client stood still for {stall_ms:,.0f} ms once: gaps up to this may be its own"
        )
    return ClientReport(cpu_share=cpu_share, stall_ms_max=stall_ms, warnings=warnings)


def _plain_settings(settings: Settings) -> dict[str, Any]:
    """What can be written to JSON, and is needed to run the same again."""
    return {each.name: _plain(getattr(settings, each.name)) for each in fields(settings)}


def _plain(value: object) -> object:
    if isinstance(value, Lengths):
        return value.words()
    if isinstance(value, Slo):
        return value.words()
    if isinstance(value, Path):
        return value.name  # a document is passed on; where it was made is nobody's business
    if isinstance(value, tuple):
        return [str(each) for each in value]
    return "inf" if value == float("inf") else value

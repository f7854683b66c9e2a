"""A run's figures as tables for people.

What an endpoint says of itself or of an error is its own text, and never a command for the
terminal: `printable` takes care of it.
"""

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from neuron_di.bench.document import ClassReport, Document, EndpointReport, Ratio
from neuron_di.bench.measured import WORDS_OF_ENDING
from neuron_di.bench.statistics import Summary
from neuron_di.terminal_text import print_table, printable

_LABEL_CHARS = 17


def print_report(document: Document, console: Console) -> None:
    """Print it. Lines of words are left to the terminal to wrap."""
    for part in report(document):
        if isinstance(part, Table):
            print_table(console, part)
        else:
            console.print(part, soft_wrap=True)


def report(document: Document) -> Iterator[RenderableType]:
    """What to print, from top to bottom."""
    yield Text.assemble(("neuron-di bench ", "bold"), f"{document.load}; {document.lengths}")
    if document.is_interrupted:
        yield Text("interrupted: what was measured until then", style="bold yellow")
    if document.num_left_out:
        words = (
            f"left out, as longer than the context: {document.num_left_out:,} requests of the trace"
        )
        yield Text(words, style="yellow")
    for endpoint in document.endpoints:
        yield Text()
        yield from _endpoint(document, endpoint)
    if document.ratios:
        yield Text()
        yield from _ratios(document.ratios)
    yield Text()
    yield from _client(document)


def _endpoint(document: Document, report: EndpointReport) -> Iterator[RenderableType]:
    figures = report.figures
    yield Text.assemble((f"{report.name}  ", "bold"), printable(f"{report.url}  {report.model}"))
    parts = [f"{figures.num_ok:,} ok", f"{figures.num_failed:,} failed"]
    if report.num_interrupted:
        parts.append(f"{report.num_interrupted:,} interrupted")
    yield _line(
        "requests",
        f"{', '.join(parts)} in {report.wall_s:,.1f} s; at most {report.most_open:,} open",
    )
    source = f"prompts of {report.prompts_of}, counted by {report.tokens_by}"
    yield _line("tokens", f"{report.prompt_tokens:,} in, {report.output_tokens:,} out; {source}")
    yield _line(
        "throughput",
        f"{report.requests_per_s:,.2f} requests/s, {report.output_tokens_per_s:,.1f} tokens/s out, "
        f"{report.total_tokens_per_s:,.1f} in and out",
    )
    if document.slo:
        share = f"{figures.num_good / figures.num:.1%}" if figures.num else "none"
        words = f"{report.goodput_per_s:,.2f} requests/s, {share} good: {document.slo}"
        yield _line("goodput", words, style="bold")
    yield Text()
    yield _times(document, report)
    if sum(each.figures.num > 0 for each in report.classes) > 1:
        yield Text()
        yield _classes(report.classes, has_slo=bool(document.slo))
    if report.failures:
        yield Text()
        yield _failures(report)
    for note in report.notes:
        yield Text(printable(f"note: {note}"), style="dim")
    if report.num_reconnects:
        words = f"note: {report.num_reconnects:,} requests were sent again on a new connection"
        yield Text(words, style="dim")


def _times(document: Document, report: EndpointReport) -> Table:
    table = _table("ms", *_SUMMARY_NAMES)
    figures = report.figures
    rows: list[tuple[str, Summary | None]] = [("TTFT", figures.ttft_ms)]
    is_open = document.loop != "closed"
    if is_open:
        rows.append(("  from sent", report.ttft_from_sent_ms))
    rows += [("ITL", figures.itl_ms), ("TPOT", figures.tpot_ms), ("E2E", figures.e2e_ms)]
    if is_open:
        rows.append(("  from sent", report.e2e_from_sent_ms))
    for name, values in rows:
        style = "dim" if name.startswith(" ") else ""
        table.add_row(f"{name:<{_LABEL_CHARS - 2}}", *_summary_cells(values), style=style)
    return table


_SUMMARY_NAMES = ("mean", "p50", "p90", "p95", "p99", "max")


def _summary_cells(values: Summary | None) -> list[str]:
    if values is None:
        return ["-"] * len(_SUMMARY_NAMES)
    numbers = [getattr(values, name) for name in _SUMMARY_NAMES]
    return [_ms(number) for number in numbers]


def _classes(classes: list[ClassReport], *, has_slo: bool) -> Table:
    good = ("good",) if has_slo else ()
    failed = ("failed",) if any(each.figures.num_failed for each in classes) else ()
    names = ("TTFT p50", "p99", "ITL p50", "p99", "E2E p50")
    table = _table("by prompt", "ok", *failed, *good, *names)
    for each in classes:
        figures = each.figures
        if not figures.num:
            continue
        share = [f"{figures.num_good / figures.num:.0%}"] if has_slo else []
        table.add_row(
            f"{each.name}, {_bounds(each)}",
            f"{figures.num_ok:,}",
            *[f"{figures.num_failed:,}" for _ in failed],
            *share,
            *_of(figures.ttft_ms, "p50", "p99"),
            *_of(figures.itl_ms, "p50", "p99"),
            *_of(figures.e2e_ms, "p50"),
        )
    return table


def _bounds(each: ClassReport) -> str:
    if each.below is None:
        return f">= {each.least:,}"
    return f"{each.least:,}-{each.below - 1:,}" if each.least else f"< {each.below:,}"


def _of(values: Summary | None, *names: str) -> list[str]:
    return ["-" if values is None else _ms(getattr(values, name)) for name in names]


def _failures(report: EndpointReport) -> Table:
    table = Table(box=None, header_style="bold red", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("failed", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("what it is, and the first one's words", min_width=24)
    meanings = {str(ending): words for ending, words in WORDS_OF_ENDING.items()}
    for name, failures in report.failures.items():
        words = meanings.get(name, "")
        if failures.example:
            words += f" ({failures.example})"
        table.add_row(Text(name), f"{failures.num:,}", Text(printable(words)))
    return table


def _ratios(found: list[Ratio]) -> Iterator[RenderableType]:
    num = max(len(each.by_slice) for each in found)
    names = " / ".join(dict.fromkeys([found[0].name, found[0].over]))
    yield Text.assemble(
        (names, "bold"), f"  ratio in each of {num:,} slices; below 1 is better for times"
    )
    table = _table("", "median", "least", "most", "better in")
    for each in found:
        values = [value for value in each.by_slice if value is not None]
        better = sum(value > 1 if each.more_is_better else value < 1 for value in values)
        is_clear = better in (0, len(values)) and each.median != 1
        style = ("green" if better else "red") if is_clear else ""
        label = each.figure if each.name == found[0].name else f"{each.name}: {each.figure}"
        numbers = (f"{value:.3f}" for value in (each.median, each.least, each.most))
        table.add_row(label, *numbers, f"{better} of {len(values)}", style=style)
    yield table


def _client(document: Document) -> Iterator[Text]:
    client = document.client
    lags = [each.lag_ms for each in document.endpoints if each.lag_ms is not None]
    words = f"{client.cpu_share:.0%} of a core, longest standstill {client.stall_ms_max:,.1f} ms"
    if lags:
        words += f", sent at most {max(each.max for each in lags):,.1f} ms late"
    yield _line("this client", words, style="dim")
    for warning in client.warnings:
        yield Text(f"warning: {warning}", style="bold yellow")


def _line(name: str, words: str, style: str = "") -> Text:
    return Text(f"{name:<{_LABEL_CHARS}}{words}", style=style)


def _table(label: str, *names: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(label, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _ms(value: float) -> str:
    """Three digits are what such a figure is worth; whole numbers from 100."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"

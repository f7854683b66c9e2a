"""The proxy benchmark's results for readers: a terminal, Markdown and JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.proxy_prompts import growth_findings, prompt_tables
from benchmarks.proxy_report import (
    COLUMNS,
    OURS,
    OURS_TWICE,
    RATIO_COLUMNS,
    STREAM_COLUMNS,
    ProxyReport,
    groups_of,
    ratio_rows,
    rows_of,
    shortfalls,
    stream_rows,
)
from benchmarks.result_files import table_lines, write_results


class Page(NamedTuple):
    """A table; `num_left` columns are names."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_left: int


def pages_of(report: ProxyReport) -> Iterator[Page]:
    """All tables: what decides comes first."""
    for ours, words in ((OURS, "Ours"), (OURS_TWICE, "Ours with two processes")):
        if rows := ratio_rows(report, ours):
            title = f"{words} / the better router, within rounds: median (range)"
            yield Page(title, RATIO_COLUMNS, rows, 0)
    yield Page("What became of the streams", STREAM_COLUMNS, stream_rows(report), 1)
    for title, (columns, prompt_rows) in prompt_tables(report).items():
        yield Page(title, columns, prompt_rows, 1)
    for title, cells in groups_of(report).items():
        yield Page(title, COLUMNS, rows_of(report, cells), 2)


def findings(report: ProxyReport) -> list[str]:
    """Everything that speaks against ours."""
    return shortfalls(report) + growth_findings(report)[1]


def verdict(report: ProxyReport) -> str:
    if not ratio_rows(report):
        return "No verdict: it takes ours and a router."
    found = findings(report)
    judged = "Ours is below both routers in every row, and no stream was treated badly."
    if found:
        judged = "\n".join(["Ours falls short:", "", *(f"- {each}" for each in found)])
    flat, _ = growth_findings(report)
    if flat:
        judged += "\n\nWhat long prompts add is no more than their bytes:\n"
    return "\n".join([judged, *(f"- {each}" for each in flat)])


def print_report(console: Console, report: ProxyReport) -> None:
    for page in reversed(list(pages_of(report))):
        _print_table(console, page)
    console.print(verdict(report))
    console.print(f"[dim]{_idle(report)}; took {report.took_s / 60:.0f} minutes[/dim]")


def write_report(report: ProxyReport, folder: Path) -> None:
    write_results(folder, "proxy", asdict(report), _markdown(report))


def _markdown(report: ProxyReport) -> list[str]:
    num_rounds = max(each.round for each in report.samples)
    reading = (
        f"Stub workers make a token per stream every {report.tick_ms:g} ms, the first one "
        f"{report.prefill_ms:g} ms after its request. Medians of {num_rounds} rounds in which the "
        "proxies, started anew for each, took turns. *CPU*: of all the proxy's processes per "
        "relayed token, requests included. *Travel*: from the worker's making a token to the "
        "client's reading it; "
        "*first*: from a request to its first token; both in ms. *MiB*: the most that the proxy's "
        "processes had resident during the load, with what they kept of earlier ones. *Bad*: "
        "streams with lost tokens, cut, refused or late, in all rounds."
    )
    made = f"Made in {report.took_s / 60:.0f} minutes by `{report.command}` on {report.machine}"
    lines = [
        "# What a proxy costs",
        "",
        f"{made}, at commit {report.commit}.",
        "",
        verdict(report),
        "",
        "![CPU, travel, time to the first token and memory](proxy.png)",
        "",
        reading,
        "",
        *(f"- {name}: {note}" for name, note in report.notes.items()),
        "",
        f"{_idle(report)}.",
    ]
    for page in pages_of(report):
        table = table_lines(page.columns, page.rows, left=range(page.num_left))
        lines += ["", f"## {page.title}", "", *table]
    return lines


def _idle(report: ProxyReport) -> str:
    shares = (f"{name} {share:.1f} %" for name, share in report.idle_percent.items())
    return f"CPU that each takes of a core while nothing is asked: {', '.join(shares)}"


def _print_table(console: Console, page: Page) -> None:
    title = page.title
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1), pad_edge=False)
    for index, column in enumerate(page.columns):
        justify = "left" if index < page.num_left else "right"
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in page.rows:
        table.add_row(*row)
    console.print(table)

"""The report as Markdown: what became of each part, every figure beside its target, tables."""

from collections.abc import Sequence

from benchmarks.device_check.parts import BY_NAME, PARTS
from benchmarks.device_check.result import Origin, PartResult, Table
from benchmarks.device_check.targets import TARGETS, verdict

_REHEARSAL = (
    "**A rehearsal: Triton's interpreter, a simulator of the CUDA runtime, a toy model. It shows "
    "that the check runs. No figure below means anything.**"
)


def as_markdown(results: Sequence[PartResult]) -> str:
    """Of parts in their order."""
    lines = ["# Device check", ""]
    if any(each.origin.is_rehearsal for each in results):
        lines += [_REHEARSAL, ""]
    lines += [*_origins(results), "", *_states(results), *_figures(results)]
    for result in results:
        lines += _details(result)
    return "\n".join(lines) + "\n"


def _origins(results: Sequence[PartResult]) -> list[str]:
    """One line for each source, machine and command, with the parts that are from there."""
    by_origin: dict[Origin, list[str]] = {}
    for result in results:
        by_origin.setdefault(result.origin, []).append(result.name)
    lines = [
        f"- {', '.join(names)}: `{origin.command}`, {origin.source}, on {origin.machine}."
        for origin, names in by_origin.items()
    ]
    if len({origin.source for origin in by_origin}) > 1:
        lines += ["", "The parts are of different sources: compare them with care."]
    return lines


def _states(results: Sequence[PartResult]) -> list[str]:
    rows = [
        [BY_NAME[each.name].title, each.state, f"{each.wall_s:.0f}", _one_line(each.reason)]
        for each in results
    ]
    there = {each.name for each in results}
    rows += [[part.title, "not run", "", ""] for part in PARTS if part.name not in there]
    return table_lines(["part", "", "s", "why"], rows, left=(0, 1, 3))


def _figures(results: Sequence[PartResult]) -> list[str]:
    rows = []
    for result in results:
        for figure in result.figures:
            target = TARGETS.get(figure.target)
            rows.append(
                [
                    target.words if target else BY_NAME[result.name].title,
                    figure.label,
                    f"{figure.value:.3g}",
                    str(target) if target else "",
                    verdict(figure, is_rehearsal=result.origin.is_rehearsal),
                ]
            )
    if not rows:
        return []
    columns = ["figure", "of", "value", "target", ""]
    return ["", "## Figures", "", *table_lines(columns, rows, left=(0, 1, 3, 4))]


def _details(result: PartResult) -> list[str]:
    lines = ["", f"## {BY_NAME[result.name].title}", "", f"{result.state}. {result.reason}".strip()]
    if result.notes:
        lines += ["", *(f"- {_one_line(note)}" for note in result.notes)]
    for table in result.tables:
        lines += ["", f"### {table.title}", "", *_table(table)]
    for name in result.plots:
        lines += ["", f"![{BY_NAME[result.name].title}]({name})"]
    if result.last_lines:
        lines += ["", *(f"    {line}" for line in result.last_lines)]
    return lines


def _table(table: Table) -> list[str]:
    return table_lines(table.columns, table.rows, left=(0,))


def table_lines(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: tuple[int, ...]
) -> list[str]:
    rule = "|".join("---" if at in left else "---:" for at in range(len(columns)))
    cells = [[_one_line(cell).replace("|", "\\|") for cell in row] for row in (columns, *rows)]
    head, *body = (f"| {' | '.join(row)} |" for row in cells)
    return [head, f"|{rule}|", *body]


def _one_line(words: str) -> str:
    return " ".join(words.split())

"""What benchmarks leave in a folder: their figures, and a page with tables of them."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path


def write_results(
    folder: Path, name: str, document: object, lines: Sequence[str], *, indent: int | None = 1
) -> None:
    """The document as NAME.json, and the lines as NAME.md. Makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = json.dumps(document, indent=indent)
    (folder / f"{name}.json").write_text(figures + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def table_lines(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)
) -> list[str]:
    """In Markdown. `left` are the columns of words, by number; the others' numbers end in line."""
    rule = "|".join("---" if number in left else "---:" for number in range(len(columns)))
    head, *body = (f"| {' | '.join(cells)} |" for cells in (columns, *rows))
    return [head, f"|{rule}|", *body]

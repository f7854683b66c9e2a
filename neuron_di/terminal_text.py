"""What is printed for people: others' words as words, and tables with all of their figures."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WIDE_CHARS = 4096


def printable(text: str) -> str:
    """Without what would command a terminal: a worker or an endpoint may say anything."""
    return "".join(char if char.isprintable() else "?" for char in text)


def print_table(console: "Console", table: "Table") -> None:
    """Print it as wide as it needs: half a figure is a wrong one, so a terminal wraps the lines.

    Columns without `no_wrap` are narrowed to their `min_width` first.
    """
    folding = [column for column in table.columns if not column.no_wrap]
    for column in folding:
        column.max_width = column.min_width
    least = console.measure(table, options=console.options.update(max_width=_WIDE_CHARS)).maximum
    if least > console.width:
        table.width = least
    else:
        for column in folding:
            column.max_width = None
    console.print(table, crop=False)

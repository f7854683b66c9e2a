"""A table of figures in the terminal."""

from collections.abc import Collection, Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table


def print_table(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[int] = (0,),
) -> None:
    """`left` are the columns of words, by number; the others' numbers end in line."""
    table = Table(box=SIMPLE, padding=(0, 1), pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number in left else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)

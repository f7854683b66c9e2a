"""What a part writes down while it runs: after each word the file is whole."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.device_check.result import Figure, PartResult, Table


class Skip(Exception):
    """Raised by a part that cannot run here. Says why."""


class Record:
    """One part's result, in a file that the run reads even after the part was killed."""

    def __init__(self, result: PartResult, path: Path) -> None:
        self.result = result
        self._path = path

    def figure(self, target: str, label: str, value: float) -> None:
        self.result.figures.append(Figure(target, label, value))
        self.save()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """The whole table so far: it replaces one of the same title."""
        table = Table(title, list(columns), [list(row) for row in rows])
        self.result.tables = [each for each in self.result.tables if each.title != title]
        self.result.tables.append(table)
        self.save()

    def note(self, words: str) -> None:
        self.result.notes.append(words)
        self.save()

    def plot(self, name: str) -> None:
        """A file that lies in the folder of the report."""
        self.result.plots.append(name)
        self.save()

    def save(self) -> None:
        whole = self._path.with_suffix(".new")
        whole.write_text(json.dumps(self.result.as_json()), encoding="utf-8")
        os.replace(whole, self._path)

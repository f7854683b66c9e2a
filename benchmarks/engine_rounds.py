"""What is measured of the engines, in rounds in which every contender has its turn."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.contender_process import ContenderProcess, Timed

PROMPT_TOKENS = 512
LONG_PROMPT_TOKENS = 2000
BATCH_MAX = 8
NUM_GREEDY = 8  # first tokens of one prompt that all contenders should agree on
_RETRIES_MAX = 3


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of prompts, answered with one token and, for `has_decode`, with many."""

    prompt_tokens: int
    batch: int
    has_decode: bool

    @property
    def prefill_name(self) -> str:
        return f"prefill {self.prompt_tokens}, batch {self.batch}"

    @property
    def decode_name(self) -> str:
        return f"decode, batch {self.batch}"


CASES = (
    Case(PROMPT_TOKENS, 1, has_decode=True),
    Case(PROMPT_TOKENS, BATCH_MAX, has_decode=True),
    Case(LONG_PROMPT_TOKENS, 1, has_decode=False),
)


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of wall time, and per second of CPU time."""

    wall: float
    cpu: float

    @classmethod
    def of_prefill(cls, case: Case, first: Timed) -> "Speed":
        """From a generation of one token: all prompt positions, and one sampled token each."""
        num_tokens = case.batch * case.prompt_tokens
        return cls(num_tokens / first.wall_s, num_tokens / first.cpu_s)

    @classmethod
    def of_decode(cls, case: Case, first: Timed, many: Timed, num_tokens: int) -> "Speed":
        """From the difference between generations of n tokens and of one token.

        ValueError when many tokens took no longer than one: noise swallowed the difference.
        """
        num_decoded = case.batch * (num_tokens - 1)
        wall_s, cpu_s = many.wall_s - first.wall_s, many.cpu_s - first.cpu_s
        if wall_s <= 0 or cpu_s <= 0:
            raise ValueError("the machine is too busy to measure decode")
        return cls(num_decoded / wall_s, num_decoded / cpu_s)


@dataclass(slots=True)
class Outcome:
    """One model's measurements. `speeds[phase][contender]` has one entry per round."""

    versions: dict[str, str] = field(default_factory=dict)
    greedy: dict[str, list[int]] = field(default_factory=dict)
    speeds: dict[str, dict[str, list[Speed]]] = field(default_factory=dict)
    peak_rss_bytes: dict[str, int] = field(default_factory=dict)
    idle_shares: dict[str, float] = field(default_factory=dict)

    def ratios(self, phase: str, name: str, peer: str, clock: str) -> list[float]:
        """How many times faster `name` was than `peer`, round by round."""
        mine, theirs = self.speeds[phase][name], self.speeds[phase][peer]
        return [getattr(a, clock) / getattr(b, clock) for a, b in zip(mine, theirs, strict=True)]


def measure(
    processes: Sequence[ContenderProcess],
    *,
    num_vocab: int,
    num_rounds: int,
    new_tokens: int,
    on_turn: Callable[[str], None],
) -> Outcome:
    """Warm every contender up in every case, then let them take turns."""
    outcome = Outcome(versions={process.name: process.version for process in processes})
    prompts = random.Random(0)
    for process in processes:
        on_turn(f"warm-up: {process.name}")
        (outcome.greedy[process.name],) = process.generate(
            [_prompt(random.Random(1), num_vocab, 100)], NUM_GREEDY
        ).token_ids
        for case in CASES:
            process.generate(_batch(prompts, num_vocab, case), 1)
            if case.has_decode:
                process.generate(_batch(prompts, num_vocab, case), new_tokens)
    for number in range(1, num_rounds + 1):
        for case in CASES:
            batch = _batch(prompts, num_vocab, case)
            for process in processes:
                on_turn(f"round {number}: {case.prefill_name}: {process.name}")
                for phase, speed in _speeds(process, case, batch, new_tokens):
                    by_name = outcome.speeds.setdefault(phase, {})
                    by_name.setdefault(process.name, []).append(speed)
    for process in processes:
        outcome.peak_rss_bytes[process.name] = process.peak_rss_bytes()
        outcome.idle_shares[process.name] = process.idle_share_max
    return outcome


def _speeds(
    process: ContenderProcess, case: Case, batch: list[list[int]], new_tokens: int
) -> Iterator[tuple[str, Speed]]:
    first = process.generate(batch, 1)
    yield case.prefill_name, Speed.of_prefill(case, first)
    if not case.has_decode:
        return
    many = process.generate(batch, new_tokens)
    for _ in range(_RETRIES_MAX):  # the machine stalled during the first, so it took longer
        if many.wall_s > first.wall_s and many.cpu_s > first.cpu_s:
            break
        first, many = process.generate(batch, 1), process.generate(batch, new_tokens)
    yield case.decode_name, Speed.of_decode(case, first, many, new_tokens)


def _batch(source: random.Random, num_vocab: int, case: Case) -> list[list[int]]:
    return [_prompt(source, num_vocab, case.prompt_tokens) for _ in range(case.batch)]


def _prompt(source: random.Random, num_vocab: int, num_tokens: int) -> list[int]:
    return [source.randrange(num_vocab) for _ in range(num_tokens)]

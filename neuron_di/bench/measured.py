"""What was measured of each request, as columns: a few numbers per request, four bytes per gap."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Ending = Literal[
    "ok",
    "refused_429",
    "refused_503",
    "refused",
    "error_event",
    "cut",
    "wrong_tokens",
    "bad_answer",
    "timeout",
    "connection",
    "interrupted",
]
ENDINGS: tuple[Ending, ...] = get_args(Ending)
EXAMPLE_CHARS_MAX = 160

WORDS_OF_ENDING: dict[Ending, str] = {
    "refused_429": "429: more than this client's share",
    "refused_503": "503: no room",
    "refused": "another status than 200",
    "error_event": "an error within the stream",
    "cut": "the stream ended before its end",
    "wrong_tokens": "more or fewer tokens than were asked for",
    "bad_answer": "an answer that cannot be understood",
    "timeout": "not over within --timeout-s",
    "connection": "no connection, or lost before the answer began",
}

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a request ended. Times are `now_s`; NaN where there was none, as of a first token.

    `output_tokens` is what usage said, else the number of chunks with text. `why` has the
    endpoint's own words on an error.
    """

    ending: Ending
    first_s: float = float("nan")
    last_s: float = float("nan")
    end_s: float = float("nan")
    prompt_tokens: int = 0
    output_tokens: int = 0
    num_chunks: int = 0
    gaps_s: Sequence[float] = ()
    why: str = ""


@dataclass(frozen=True)
class Columns:
    """What was measured, as arrays with one entry per request, in the order in which they ended.

    The gaps of request i are `gaps_s[gap_starts[i] : gap_starts[i + 1]]`.
    """

    index: NDArray[np.int64]
    slice_index: NDArray[np.int64]
    ending: NDArray[np.int64]
    planned_tokens: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    num_chunks: NDArray[np.int64]
    intended_s: Numbers
    sent_s: Numbers
    first_s: Numbers
    last_s: Numbers
    end_s: Numbers
    lag_s: Numbers  # by which the client itself was late to send; NaN in a closed loop
    gaps_s: NDArray[np.float32]
    gap_starts: NDArray[np.int64]

    @property
    def is_ok(self) -> NDArray[np.bool_]:
        is_ok: NDArray[np.bool_] = self.ending == ENDINGS.index("ok")
        return is_ok

    @cached_property
    def ttft_s(self) -> Numbers:
        """From the intended time of sending to the first token."""
        return self.first_s - self.intended_s

    @cached_property
    def e2e_s(self) -> Numbers:
        """From the intended time of sending to the last token."""
        return self.last_s - self.intended_s

    @cached_property
    def tpot_s(self) -> Numbers:
        """Seconds per token after the first; NaN for an answer of one token."""
        later = self.output_tokens - 1.0
        return np.where(later > 0, (self.last_s - self.first_s) / np.maximum(later, 1), np.nan)

    def gaps_of(self, chosen: NDArray[np.bool_]) -> NDArray[np.float32]:
        """The gaps of the chosen requests, one after another."""
        return self.gaps_s[np.repeat(chosen, np.diff(self.gap_starts))]


class Measured:
    """What was measured of one endpoint so far. Grows by `add`."""

    def __init__(self) -> None:
        self._whole = {name: array("q") for name in _WHOLE}
        self._times = {name: array("d") for name in _TIMES}
        self._gaps_s = array("f")
        self._gap_starts = array("q", [0])
        self.examples: dict[Ending, str] = {}  # the first error of each kind, in its own words
        self.counts: Counter[Ending] = Counter()

    def add(
        self,
        index: int,
        slice_index: int,
        planned_tokens: int,
        intended_s: float,
        sent_s: float,
        outcome: Outcome,
        *,
        lag_s: float = float("nan"),
    ) -> None:
        """Note a request. Keeps nothing of `outcome` but its numbers."""
        self.counts[outcome.ending] += 1
        if outcome.why:
            self.examples.setdefault(outcome.ending, outcome.why[:EXAMPLE_CHARS_MAX])
        values = (
            index,
            slice_index,
            ENDINGS.index(outcome.ending),
            planned_tokens,
            outcome.prompt_tokens,
            outcome.output_tokens,
            outcome.num_chunks,
        )
        for name, value in zip(_WHOLE, values, strict=True):
            self._whole[name].append(value)
        times = (intended_s, sent_s, outcome.first_s, outcome.last_s, outcome.end_s, lag_s)
        for name, time_s in zip(_TIMES, times, strict=True):
            self._times[name].append(time_s)
        self._gaps_s.extend(outcome.gaps_s)
        self._gap_starts.append(len(self._gaps_s))

    def columns(self) -> Columns:
        """A copy of what there is."""
        columns = {name: np.array(values) for name, values in self._whole.items()}
        times = {name: np.array(values) for name, values in self._times.items()}
        return Columns(
            **columns,
            **times,
            gaps_s=np.array(self._gaps_s, np.float32),
            gap_starts=np.array(self._gap_starts),
        )


_WHOLE = ("index", "slice_index", "ending", "planned_tokens", "prompt_tokens", "output_tokens",
          "num_chunks")  # fmt: skip
_TIMES = ("intended_s", "sent_s", "first_s", "last_s", "end_s", "lag_s")

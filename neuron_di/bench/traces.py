"""Reads traces of real traffic: Mooncake's JSONL and Azure's CSV.

Mooncake: one document per line, `timestamp` in ms, `input_length`, `output_length`, and `hash_ids`,
one per 512 tokens of the prompt, the last for what is left. Equal ids are equal blocks after equal
blocks: a prefix that requests share. Azure: `TIMESTAMP,ContextTokens,GeneratedTokens`, and not a
word on prefixes.
"""

import csv
import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np

from neuron_di.bench.arrivals import Seconds
from neuron_di.bench.lengths import TOKENS_MAX, Tokens
from neuron_di.errors import ConfigError

BLOCK_TOKENS = 512  # that one hash id stands for, in Mooncake's traces
LINE_CHARS_MAX = 1 << 20
_CSV_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class _Line(msgspec.Struct):
    """A line of a Mooncake trace. What else it says is not needed."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


_line_decoder = msgspec.json.Decoder(_Line)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival, as columns.

    The hash ids of request i are `hash_ids[hash_starts[i] : hash_starts[i + 1]]`.
    """

    at_s: Seconds
    input_tokens: Tokens
    output_tokens: Tokens
    hash_ids: Tokens
    hash_starts: Tokens

    def __len__(self) -> int:
        return len(self.at_s)

    def hashes(self, index: int) -> Tokens:
        return self.hash_ids[self.hash_starts[index] : self.hash_starts[index + 1]]


class _Columns:
    """A trace while it is read. Its lines need not be in the order of their times."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at_s = array("d")
        self._inputs = array("q")
        self._outputs = array("q")
        self._hash_ids = array("q")
        self._starts = array("q", [0])

    def add(self, at_s: float, num_in: int, num_out: int, hash_ids: Iterable[int] = ()) -> None:
        """ValueError says what is wrong with the line."""
        if not math.isfinite(at_s):
            raise ValueError("its time is no number")
        if not (0 <= num_in <= TOKENS_MAX and 0 <= num_out <= TOKENS_MAX):
            raise ValueError(f"its token counts are not within 0 to {TOKENS_MAX:,}")
        try:
            self._hash_ids.extend(hash_ids)
        except OverflowError:
            raise ValueError("a hash id does not fit into 64 bits") from None
        self._at_s.append(at_s)
        # An empty prompt cannot be asked for, nor an answer without a token.
        self._inputs.append(max(1, num_in))
        self._outputs.append(max(1, num_out))
        self._starts.append(len(self._hash_ids))

    def done(self) -> Trace:
        """The trace. ConfigError when it has no request."""
        if not self._at_s:
            raise ConfigError(f"{self._path} has no request")
        at_s = np.array(self._at_s)
        order = np.argsort(at_s, kind="stable")
        starts = np.array(self._starts)
        counts = np.diff(starts)[order]
        if (order[1:] < order[:-1]).any() and len(self._hash_ids):
            pieces = [np.arange(starts[i], starts[i + 1]) for i in order]
            hash_ids = np.array(self._hash_ids)[np.concatenate(pieces)]
        else:
            hash_ids = np.array(self._hash_ids)
        return Trace(
            at_s[order] - at_s[order[0]],
            np.array(self._inputs)[order],
            np.array(self._outputs)[order],
            hash_ids,
            np.concatenate([[0], np.cumsum(counts)]),
        )


def read_trace(path: Path, *, block_tokens: int = BLOCK_TOKENS) -> Trace:
    """The trace in a file; its first line says of which kind. ConfigError names a bad line."""
    columns = _Columns(path)
    number = 0
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            first = lines.readline(LINE_CHARS_MAX)
            is_csv = not first.lstrip().startswith("{")
            places = _places(path, first) if is_csv else ()
            number = 1 if is_csv else 0
            if not is_csv:
                lines.seek(0)
            while line := lines.readline(LINE_CHARS_MAX):
                number += 1
                if line.strip():
                    if is_csv:
                        _add_csv(columns, line, places)
                    else:
                        _add_json(columns, line, block_tokens)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no text in UTF-8, near line {number + 1}") from None
    except (ValueError, csv.Error, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} line {number}: {error}") from None
    return columns.done()


def _places(path: Path, header: str) -> tuple[int, ...]:
    """Where a CSV file has the columns that are needed."""
    try:
        names = [name.strip().lstrip("\ufeff") for name in next(csv.reader([header]), [])]
    except csv.Error:  # a cell that is too long, as of a JSON list in one line
        names = []
    missing = [name for name in _CSV_COLUMNS if name not in names]
    if missing:
        raise ConfigError(
            f"{path} is no trace: line 1 is neither a JSON document, as in Mooncake's traces, nor "
            f"a CSV header with {', '.join(missing)}, as in Azure's"
        )
    return tuple(names.index(name) for name in _CSV_COLUMNS)


def _add_json(columns: _Columns, line: str, block_tokens: int) -> None:
    found = _line_decoder.decode(line)
    needed = -(-found.input_length // block_tokens)
    # Some traces give no id to a last block that is not full.
    if found.hash_ids and len(found.hash_ids) not in (needed, needed - 1):
        raise ValueError(
            f"{found.input_length:,} tokens are {needed} blocks of {block_tokens}, and it has "
            f"{len(found.hash_ids)} hash_ids: see --trace-block-tokens"
        )
    columns.add(found.timestamp / 1000, found.input_length, found.output_length, found.hash_ids)


def _add_csv(columns: _Columns, line: str, places: tuple[int, ...]) -> None:
    cells = next(csv.reader([line]))
    if len(cells) <= max(places):
        raise ValueError(f"it has {len(cells)} columns, and needs {max(places) + 1}")
    moment, num_in, num_out = (cells[place].strip() for place in places)
    columns.add(_seconds(moment), int(num_in), int(num_out))


def _seconds(moment: str) -> float:
    """Of `2023-11-16 18:17:03.9799600`, or a plain number of seconds. Only differences count."""
    try:
        return float(moment)
    except ValueError:
        when = datetime.fromisoformat(moment)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()

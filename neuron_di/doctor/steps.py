"""What a process that tries something out tells the one that started it, on its standard output.

A line of JSON when a step begins and one when it ended, so that it is known what a process was at
when a library ended it or never came back. Libraries print there, too: other lines are theirs.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from neuron_di.errors import NeuronDiError
from neuron_di_bindings.nrt import NrtError, NrtMissing, NrtMisuse, NrtUnsupported

_STDOUT = 1
_WORDS_MAX = 600  # why there is no runtime has each path twice, and what to do at its end

# What a machine may be the reason for, beside what the runtime answers.
_MAY_BE = (
    *(NeuronDiError, NrtMissing, NrtMisuse, NrtUnsupported),
    *(OSError, ValueError, RuntimeError, ImportError),
)

Facts = dict[str, Any]


@dataclass(slots=True)
class Steps:
    """The steps that a process took: what each found, and the one that it was at, if any.

    A step that failed has "failed", in words, and "status", where the Neuron runtime gave one.
    """

    found: dict[str, Facts] = field(default_factory=dict)
    begun: str | None = None

    def of(self, step: str) -> Facts:
        """Empty where it did not get there."""
        return self.found.get(step, {})

    def hear(self, line: str) -> Facts | None:
        """Take a line of its output. None where it is not one of ours, else what it says."""
        try:
            said = json.loads(line)
        except ValueError:
            return None
        if not isinstance(said, dict):
            return None
        if isinstance(begun := said.get("begins"), str):
            self.begun = begun
        elif isinstance(step := said.pop("step", None), str):
            self.found[step] = said
            self.begun = None
        else:
            return None
        return said


def take(step: str, action: Callable[[], Facts | None]) -> bool:
    """Take a step and tell of it, with what it found. False where it failed, for reasons that a
    machine may have."""
    _say({"begins": step})
    try:
        facts = action() or {}
    except NrtError as error:
        facts = {"failed": _words(error), "status": int(error.status)}
    except _MAY_BE as error:
        facts = {"failed": _words(error)}
    _say({"step": step, **facts})
    return "failed" not in facts


def _words(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:_WORDS_MAX]


def _say(line: Mapping[str, Any]) -> None:
    """As a line of its own, whatever a library left unfinished."""
    text = b"\n" + json.dumps(line).encode() + b"\n"
    while text:
        text = text[os.write(_STDOUT, text) :]

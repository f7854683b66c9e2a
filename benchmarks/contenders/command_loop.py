"""The process of every contender: load a model, then obey one command after another.

Commands come as JSON lines on standard input, answers leave as JSON lines on standard output:

    argv[1]  Settings
    <-       {"ready": "name and version"}
    ->       {"prompts": [[token ids], ...], "num_tokens": n}
    <-       {"wall_s": seconds, "token_ids": [[n ids], ...]}

The standard library only: it also runs in environments that have no neuron_di.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

Generate = Callable[[list[list[int]], int], list[list[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is the same for all contenders, but for `compiled`."""

    model: str  # folder
    dtype: str
    threads: int
    batch_max: int  # prompts at once
    context_tokens: int
    step_tokens: int  # of a prefill batch that must fit into one step
    kv_bytes: int
    compiled: bool = False  # where the engine offers both
    prefix_caching: bool = False  # likewise; else a prompt that comes again is computed again
    device: str = "cpu"  # as our engine calls it
    torch_device: str = "cpu"  # of an engine that is torch's own


def obey(load: Callable[[Settings], tuple[str, Generate]]) -> None:
    """Load with the settings of argv[1], then answer commands until standard input ends.

    `load` returns the engine's name and version, and a function that answers prompts greedily
    with exactly n tokens each, whatever the end tokens.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not end up among the answers
    name, generate = load(Settings(**json.loads(sys.argv[1])))
    print(json.dumps({"ready": name}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        start_s = time.perf_counter()
        token_ids = generate(command["prompts"], command["num_tokens"])
        wall_s = time.perf_counter() - start_s
        print(json.dumps({"wall_s": wall_s, "token_ids": token_ids}), file=answers)

"""Our `LLM` and vLLM's, with a prefix cache and without: a process each, one prompt at a time."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.contender_process import Contender, ContenderProcess, loaded
from benchmarks.contenders.command_loop import Settings
from benchmarks.prefix_prompts import FRESH_TOKENS, Prompt
from benchmarks.prefix_report import OFF, ON, OURS, SETTINGS, VLLM, Answer, Setting
from benchmarks.provenance import choose_cores

CONTEXT_TOKENS = 8000 + 2 * FRESH_TOKENS
KV_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Offline:
    """One of them. As a benchmark's side it waits for nobody, but its methods are a server's."""

    process: ContenderProcess

    async def ask_all(self, prompts: list[Prompt]) -> tuple[list[Answer], float]:
        """A token for each: its time is that of the first token. CPU seconds of them together."""
        answers, cpu_s = [], 0.0
        for prompt in prompts:
            timed = self.process.generate([prompt.ids], 1)
            cpu_s += timed.cpu_s
            answers.append(
                Answer(
                    first_s=timed.wall_s,
                    num_prompt=len(prompt.ids),
                    num_found=None,
                    num_to_find=0,
                    tokens=[(each, None) for each in timed.token_ids[0]],
                )
            )
        return answers, cpu_s


def contenders(vllm_python: Path) -> list[Contender]:
    return [
        Contender(OURS, "benchmarks.contenders.ours"),
        Contender(VLLM, "benchmarks.contenders.vllm_cpu", str(vllm_python)),
    ]


@contextmanager
def offline(
    chosen: Sequence[Contender], model: Path
) -> Iterator[dict[str, dict[Setting, Offline]]]:
    """All of them with the cache and without it, on one core. ProcessFailed where one fails."""
    settings = Settings(
        model=str(model),
        dtype="float32",
        threads=1,
        batch_max=1,
        context_tokens=CONTEXT_TOKENS,
        step_tokens=CONTEXT_TOKENS,
        kv_bytes=KV_BYTES,
    )
    cores = choose_cores(1, os.sched_getaffinity(0))
    with (
        loaded(chosen, settings) as without,
        loaded(chosen, replace(settings, prefix_caching=True)) as with_it,
    ):
        for process in (*without, *with_it):
            process.pin(cores)
        by_setting = dict(zip(SETTINGS, (without, with_it), strict=True))
        yield {
            each.name: {setting: Offline(by_setting[setting][place]) for setting in (OFF, ON)}
            for place, each in enumerate(chosen)
        }

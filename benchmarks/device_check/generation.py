"""Whole generations, ours and Hugging Face's, each in a process of its own, in turns."""

import json
import random
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Self

from benchmarks.contenders.command_loop import Settings as ContenderSettings
from benchmarks.device_check.settings import Settings

if TYPE_CHECKING:
    from benchmarks.contender_process import ContenderProcess


class Sides:
    """Both loaded, as far as they can be: `words` says of each what it is, or why it is not."""

    def __init__(self, settings: Settings, folder: Path, batch_max: int) -> None:
        self._prompt_tokens = settings.pick(256, 256, 8)
        self._num_new = settings.pick(65, 33, 4)
        self._rounds = settings.pick(3, 2, 1)
        self._num_vocab = json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"]
        context = self._prompt_tokens + self._num_new + 16
        self._settings = ContenderSettings(
            model=str(folder),
            dtype="bfloat16",
            threads=1 if settings.is_small else 4,
            batch_max=batch_max,
            context_tokens=context,
            step_tokens=4096,
            kv_bytes=settings.pick(batch_max * context << 18, batch_max * context << 18, 64 << 20),
            device=settings.device,
            # Without a GPU it is torch's CPU that stands for it.
            torch_device="cpu" if settings.is_small else "cuda",
        )
        self._stack = ExitStack()
        self._ours: ContenderProcess | None = None
        self._theirs: ContenderProcess | None = None
        self.words: list[str] = []

    def __enter__(self) -> Self:
        self._ours = self._load("neuron-di", "benchmarks.contenders.ours")
        self._theirs = self._load("Hugging Face", "benchmarks.contenders.hugging_face")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def tokens_per_s(self, batch: int) -> tuple[float | None, float | None]:
        """Decoded tokens per second of both: a generation of n tokens minus one of one.

        None for a side that is not there, or whose difference was noise.
        """
        source = random.Random(batch)
        prompts = [
            [source.randrange(3, self._num_vocab) for _ in range(self._prompt_tokens)]
            for _ in range(batch)
        ]
        speeds: dict[str, list[float]] = {}
        for turn in range(self._rounds + 1):  # the first one warms up
            for process in (self._ours, self._theirs):
                if process is None:
                    continue
                first = process.generate(prompts, 1).wall_s
                many = process.generate(prompts, self._num_new).wall_s
                if turn and many > first:  # else noise swallowed the difference
                    speed = batch * (self._num_new - 1) / (many - first)
                    speeds.setdefault(process.name, []).append(speed)

        def middle(process: "ContenderProcess | None") -> float | None:
            found = speeds.get(process.name) if process is not None else None
            return median(found) if found else None

        return middle(self._ours), middle(self._theirs)

    def _load(self, name: str, module: str) -> "ContenderProcess | None":
        try:
            from benchmarks.contender_process import Contender, ContenderProcess
            from benchmarks.line_process import ProcessFailed
        except ModuleNotFoundError as error:
            self.words.append(f"{name} was not measured: {error}.")
            return None
        try:
            process = ContenderProcess(Contender(name, module), self._settings)
        except ProcessFailed as error:
            self.words.append(f"{name} was not measured: {str(error).strip().splitlines()[-1]}")
            return None
        self._stack.callback(process.end)
        self.words.append(f"{process.version}, prompts of {self._prompt_tokens} tokens.")
        return process

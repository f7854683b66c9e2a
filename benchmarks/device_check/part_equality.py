"""Tokens of 50 prompts: the GPU in float32 and in bfloat16 beside the CPU backend in float32.

All of them are fed the CPU's tokens, so that each position is compared whatever came before it.
Where none differs, each by itself would have written the same.

How far bfloat16 is off is the model's doing, too. So the CPU backend computes in bfloat16 as well,
for some of the prompts, and the GPU's error is judged by its error.
"""

import math
import random
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from benchmarks.device_check.device_model import DeviceModel, device_model
from benchmarks.device_check.models import checkpoint
from benchmarks.device_check.record import Record
from benchmarks.device_check.settings import Settings
from neuron_di.core import DecodeBatch
from neuron_di.request import Request


@dataclass(slots=True)
class Difference:
    """Between one device's logits and the reference's, position by position."""

    num_tokens: int = 0
    num_differing: int = 0
    prompts: set[int] = field(default_factory=set)  # that have a token that differs
    largest: float = 0.0  # of all logits, absolute
    squares: float = 0.0  # sums, of the differences and of the reference
    squares_of_reference: float = 0.0
    margins: list[float] = field(default_factory=list)  # the reference's, where another won

    def add(self, prompt: int, wanted_V: Tensor, got_V: Tensor) -> None:
        wanted_V, got_V = wanted_V.double().cpu(), got_V.double().cpu()
        error_V = got_V - wanted_V
        self.num_tokens += 1
        self.largest = max(self.largest, float(error_V.abs().max()))
        self.squares += float(error_V.square().sum())
        self.squares_of_reference += float(wanted_V.square().sum())
        best, chosen = int(wanted_V.argmax()), int(got_V.argmax())
        if best != chosen:
            self.num_differing += 1
            self.prompts.add(prompt)
            self.margins.append(float(wanted_V[best] - wanted_V[chosen]))

    @property
    def relative(self) -> float:
        """Root of the mean square, relative to the reference's. NaN where logits are."""
        return math.sqrt(self.squares / self.squares_of_reference)


@dataclass(slots=True)
class Side:
    """One device with its own copy of every request."""

    model: DeviceModel
    requests: list[Request] = field(default_factory=list)

    def first_logits(self, index: int, num_prompt: int, num_new: int) -> Tensor:
        request = self.model.request(num_prompt, num_new, seed=index)
        self.requests.append(request)
        return self.model.prefill(request)

    def next_logits(self) -> Tensor:
        batch = DecodeBatch(tuple(self.requests))
        logits_BV = self.model.logits(batch)
        batch.mark_computed()
        return logits_BV


def measure(settings: Settings, record: Record) -> None:
    shape = settings.shapes[0]
    folder = checkpoint(shape, Path(settings.models))
    num_prompts, num_new = settings.pick(50, 20, 2), settings.pick(32, 16, 4)
    most = settings.pick(200, 100, 24)
    source = random.Random(7)
    lengths = [source.randint(16, most) for _ in range(num_prompts)]
    on_gpu = {dtype: (settings.device, dtype) for dtype in ("float32", "bfloat16")}
    all_words = f"{shape}, {num_prompts} prompts of 16 to {most} tokens, {num_new} new ones each"
    found = differences(folder, on_gpu, lengths, num_new)
    tell(record, all_words, found)
    record.figure("float32_differing", all_words, found["float32"].num_differing)
    some = lengths[: settings.pick(8, 4, 2)]
    found = differences(
        folder,
        {"bfloat16": on_gpu["bfloat16"], "bfloat16, CPU": ("cpu", "bfloat16")},
        some,
        settings.pick(16, 8, 4),
    )
    some_words = f"{shape}, {len(some)} of the prompts"
    tell(record, some_words, found)
    record.figure(
        "bfloat16_logits", some_words, found["bfloat16"].relative / found["bfloat16, CPU"].relative
    )


def differences(
    folder: Path, wanted: dict[str, tuple[str, str]], lengths: list[int], num_new: int
) -> dict[str, Difference]:
    """Of each named device and dtype, from the CPU in float32."""
    found = {name: Difference() for name in wanted}
    with ExitStack() as stack:

        def side(device: str, dtype: str) -> Side:
            opened = device_model(
                folder,
                device=device,
                dtype=dtype,
                num_tokens=sum(lengths) + len(lengths) * num_new,
                context_tokens=max(lengths) + num_new,
                decode_batch=len(lengths),
            )
            return Side(stack.enter_context(opened))

        reference = side("cpu", "float32")
        sides = {name: side(*each) for name, each in wanted.items()}
        compare(reference, sides, found, lengths, num_new)
    return found


def compare(
    reference: Side,
    sides: dict[str, Side],
    differences: dict[str, Difference],
    lengths: list[int],
    num_new: int,
) -> None:
    """Everybody computes every prompt and every step of the reference's."""
    for index, length in enumerate(lengths):
        wanted_V = reference.first_logits(index, length, num_new).clone()
        for name, each in sides.items():
            differences[name].add(index, wanted_V, each.first_logits(index, length, num_new))
        for each in (reference, *sides.values()):
            each.requests[index].generated.append(int(wanted_V.argmax()))
    for _ in range(num_new - 1):
        wanted_BV = reference.next_logits()
        got = {name: each.next_logits() for name, each in sides.items()}
        for index, wanted_V in enumerate(wanted_BV):
            for name, got_BV in got.items():
                differences[name].add(index, wanted_V, got_BV[index])
            for each in (reference, *sides.values()):
                each.requests[index].generated.append(int(wanted_V.argmax()))


def tell(record: Record, title: str, differences: dict[str, Difference]) -> None:
    rows = []
    for dtype, found in differences.items():
        rows.append(
            [
                dtype,
                f"{found.num_differing} of {found.num_tokens}",
                str(len(found.prompts)),
                f"{found.relative:.2e}",
                f"{found.largest:.2e}",
                f"{max(found.margins):.2e}" if found.margins else "-",
            ]
        )
    columns = ["", "tokens that differ", "prompts with one", "RMS error", "largest error",
               "largest margin lost"]  # fmt: skip
    record.table(f"Beside the CPU in float32: {title}", columns, rows)

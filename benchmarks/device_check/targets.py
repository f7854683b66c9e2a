"""What was promised of --device cuda, and whether a figure keeps it."""

from dataclasses import dataclass

from benchmarks.device_check.result import Figure


@dataclass(frozen=True, slots=True)
class Target:
    """A bound, inclusive: the least where `is_floor`, else the most."""

    words: str
    bound: float
    is_floor: bool

    def is_met_by(self, value: float) -> bool:
        """False for NaN."""
        return value >= self.bound if self.is_floor else value <= self.bound

    def __str__(self) -> str:
        return f"at {'least' if self.is_floor else 'most'} {self.bound:g}"


TARGETS = {
    "float32_differing": Target("float32 tokens that differ from the CPU backend's", 0, False),
    "bfloat16_logits": Target(
        "bfloat16 logits: RMS error from float32, times the CPU backend's", 1.25, False
    ),
    "decode_roofline": Target(
        "decode: weights and KV read per step / measured copy bandwidth", 0.6, True
    ),
    "decode_hugging_face": Target("decode: times Hugging Face generate", 3.0, True),
    "prefill_rate": Target("prefill: share of the measured bf16 matrix rate", 0.5, True),
    "invariant_rows": Target(
        "batch-invariant: rows whose logits depend on who shares the batch", 0, False
    ),
    "transfer_copy": Target("transfer: share of a device-to-device copy's speed", 0.9, True),
    "step_while_moving": Target("decode step during a transfer / without one", 1.05, False),
}


def verdict(figure: Figure, *, is_rehearsal: bool) -> str:
    """met, UNMET, or why there is no verdict."""
    if is_rehearsal:
        return "rehearsal: means nothing"
    if not figure.target:
        return "no target"
    return "met" if TARGETS[figure.target].is_met_by(figure.value) else "UNMET"

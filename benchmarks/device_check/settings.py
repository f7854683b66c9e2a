"""What every part of a run is told, as one JSON argument."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`shapes` are keys of models.SHAPES. `device` is cuda, but in tests of the check itself."""

    shapes: tuple[str, ...]
    models: str  # folder that checkpoints are written to, and found in
    out: str  # folder of the report and its plots
    is_rehearsal: bool = False
    is_quick: bool = False
    wants_mps: bool = False
    device: str = "cuda"

    @property
    def is_small(self) -> bool:
        """Whether nothing is to be learned but that it runs."""
        return self.is_rehearsal or self.device == "cpu"

    def pick(self, full: int, quick: int, small: int) -> int:
        """How much of something this run has."""
        return small if self.is_small else quick if self.is_quick else full

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        return cls(**{**fields, "shapes": tuple(fields["shapes"])})

"""What requests take that say nothing of how tokens are drawn."""

from typing import Annotated, Any

import msgspec

_TopK = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """As the model's makers advise. None: as in SamplingParams, whose fields these are."""

    temperature: float | None = None
    top_k: _TopK | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def given(self) -> dict[str, Any]:
        """Those that are not None, by name."""
        return {
            name: value for name, value in msgspec.structs.asdict(self).items() if value is not None
        }

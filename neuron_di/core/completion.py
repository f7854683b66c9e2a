"""How a transfer tells its outcome: polled, never waited for (N-50)."""

from typing import Protocol

from neuron_di.errors import NeuronDiError


class CompletionToken(Protocol):
    """The state of one transfer. Any thread may ask; the answer never goes back from done."""

    def is_done(self) -> bool:
        """True once the transfer ended, well or badly. Returns at once."""
        ...

    def error(self) -> NeuronDiError | None:
        """Why it failed; None while it runs and when it succeeded."""
        ...

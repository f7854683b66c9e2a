"""Which ids a request has had, for its penalties: kept up, not counted anew for each token."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Ints = npt.NDArray[np.int64]

_FEW = 16  # new ids: more are counted at once with all others


class SeenTokens:
    """`ids` are those of the prompt and the output, `generated_ids` those of the output, which came
    `counts` times. None of the two has an id twice.

    What it costs per token depends on how many different ids there are, not on how many there were.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._prompt_ids: _Ints = np.unique(np.array(prompt_ids, np.int64))
        self.ids: _Ints
        self.generated_ids: _Ints
        self.counts: _Ints
        self._recount(())

    def follow(self, generated: Sequence[int]) -> None:
        """`generated` are all output ids so far."""
        fresh = generated[self._num_generated :]
        if len(fresh) > _FEW:
            self._recount(generated)
            return
        for token_id in fresh:
            self._num_generated += 1
            place = self._places.get(token_id)
            if place is not None:
                self.counts[place] += 1
                continue
            self._places[token_id] = len(self.counts)
            self.generated_ids = np.append(self.generated_ids, token_id)
            self.counts = np.append(self.counts, 1)
            if token_id not in self._known:
                self._known.add(token_id)
                self.ids = np.append(self.ids, token_id)

    def _recount(self, generated: Sequence[int]) -> None:
        self.generated_ids, self.counts = np.unique(
            np.array(generated, np.int64), return_counts=True
        )
        self.ids = np.union1d(self._prompt_ids, self.generated_ids)
        self._places = {token_id: n for n, token_id in enumerate(self.generated_ids.tolist())}
        self._known = set(self.ids.tolist())
        self._num_generated = len(generated)

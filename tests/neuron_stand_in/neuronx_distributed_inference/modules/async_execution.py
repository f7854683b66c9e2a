"""async_mode: the next step is on its way before the caller has seen the last one's tokens.

A batch that is asked for twice in a row runs one step ahead. When the caller comes back with
another batch, the step in flight is thrown away, but its KV is written all the same, and late: a
slot that was given to somebody else in the meantime gets one write at a position of its old
sequence. Here that happens at the next call of forward, and not before.
"""

import torch
from torch import Tensor

from neuronx_distributed_inference.models.model_wrapper import ModelWrapper, Output


class AsyncSteps:
    """Runs token generation one step ahead. Used by the thread that calls forward."""

    def __init__(self, wrapper: ModelWrapper, seq_len: int) -> None:
        self._wrapper = wrapper
        self._seq_len = seq_len
        self._prior_slots: Tensor | None = None
        self._in_flight: tuple[Tensor, ...] | None = None  # the inputs of the step ahead

    def stop(self) -> None:
        """End what is in flight: its writes are made now. The next batch begins anew."""
        self._land()
        self._prior_slots = None

    def run(
        self, ids: Tensor, mask: Tensor, positions: Tensor, slots: Tensor, params: Tensor
    ) -> Output:
        """One step's answer. Where a step was ahead it is that step's, whatever `ids` says."""
        if self._prior_slots is None:
            self._prior_slots = slots
        is_same = torch.equal(self._prior_slots, slots)
        if not is_same or self._is_near_bucket_end(mask.shape[1]):
            self.stop()
            return self._wrapper(ids, mask, positions, slots, params)
        answer = self._land()
        if answer is None:
            answer = self._wrapper(ids, mask, positions, slots, params)
        if self._seq_len - int(positions.max()) > 2:
            self._launch(answer, positions, slots, params)
        return answer

    def _launch(self, answer: Output, positions: Tensor, slots: Tensor, params: Tensor) -> None:
        tokens = answer[0] if isinstance(answer, list) else answer
        if tokens.dim() != 1:
            raise RuntimeError(
                f"async_mode feeds what a step returns into the next one: {tuple(tokens.shape)} "
                "are no token ids; it needs on-device sampling"
            )
        following = positions + 1
        width = int(following.max())
        mask = (following - 1 >= torch.arange(width)).to(positions.dtype)
        self._in_flight = (tokens[:, None], mask, following, slots, params)

    def _land(self) -> Output | None:
        """The step in flight runs, at last."""
        inputs, self._in_flight = self._in_flight, None
        return None if inputs is None else self._wrapper(*inputs)

    def _is_near_bucket_end(self, known: int) -> bool:
        buckets: list[int] = self._wrapper.neuron_config.buckets
        return any(known < bucket <= known + 2 for bucket in buckets)

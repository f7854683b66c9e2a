"""What a worker says at the end of a leg: the terminal event and its receipt."""

import os
from typing import Literal

from neuron_di.engine import Ended, Timing
from neuron_di.errors import NeuronDiError
from neuron_di.types import WorkerId
from neuron_di.wire import Done, Failed, Finished, LegReceipt, Released


class LegReport:
    """Knows who this worker is and which link moves its KV."""

    def __init__(
        self, worker_id: WorkerId, role: Literal["prefill", "decode", "both"], link: str
    ) -> None:
        self._worker_id: WorkerId = worker_id
        self._role: Literal["prefill", "decode", "both"] = role
        self._link = link

    def finished(
        self,
        event: Ended,
        *,
        kv_blocks: int = 0,
        kv_bytes: int = 0,
        transfer_s: float = 0.0,
        verify_s: float = 0.0,
    ) -> Finished:
        """The request is complete; the numbers say what was received for it, if anything."""
        timing = event.timing
        return Finished(
            reason=event.reason,
            num_prompt=event.num_prompt,
            num_generated=event.num_generated,
            text=event.text,
            stop=event.stop,
            num_cached=event.num_cached,
            receipt=LegReceipt(
                worker_id=self._worker_id,
                role=self._role,
                pid=os.getpid(),
                queued_s=timing.queued_s,
                prefill_s=timing.prefill_s,
                decode_s=timing.decode_s,
                num_prompt=event.num_prompt,
                num_generated=event.num_generated,
                link=self._link if kv_bytes else "",
                kv_blocks=kv_blocks,
                kv_bytes=kv_bytes,
                transfer_s=transfer_s,
                verify_s=verify_s,
            ),
        )

    def released(
        self,
        timing: Timing,
        *,
        num_prompt: int,
        num_generated: int,
        kv_blocks: int,
        verify_s: float,
        done: Done,
    ) -> Released:
        """The prompt was computed here, and the decode worker has it."""
        return Released(
            receipt=LegReceipt(
                worker_id=self._worker_id,
                role=self._role,
                pid=os.getpid(),
                queued_s=timing.queued_s,
                prefill_s=timing.prefill_s,
                num_prompt=num_prompt,
                num_generated=num_generated,
                link=self._link,
                kv_blocks=kv_blocks,
                kv_bytes=done.kv_bytes,
                transfer_s=done.transfer_s,
                verify_s=verify_s,
            )
        )


def failed(error: NeuronDiError) -> Failed:
    """An error as the last event of a leg."""
    return Failed(
        code=error.code,
        message=error.message,
        http_status=error.http_status,
        retryable=error.retryable,
        fault=error.fault,
        param=error.param,
    )

"""What a worker says at the end of a leg: the terminal event and its receipt."""

import os
from typing import Literal

from neuron_di.engine import Ended, Timing
from neuron_di.errors import LocalProtocolError, NeuronDiError, WorkerFailed
from neuron_di.transfer import Arrival
from neuron_di.types import WorkerId
from neuron_di.wire import REASON_CHARS_MAX, Done, Failed, Finished, LegReceipt, Released


class LegReport:
    """Knows who this worker is."""

    def __init__(self, worker_id: WorkerId, role: Literal["prefill", "decode", "both"]) -> None:
        self._worker_id: WorkerId = worker_id
        self._role: Literal["prefill", "decode", "both"] = role

    def finished(
        self, event: Ended, *, kv_blocks: int = 0, arrived: Arrival | None = None
    ) -> Finished:
        """The request is complete; `arrived` says what was received for it, if anything."""
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
                link=arrived.engine if arrived is not None else "",
                link_reason=arrived.engine_reason if arrived is not None else "",
                form=arrived.form if arrived is not None else None,
                kv_blocks=kv_blocks,
                kv_bytes=arrived.kv_bytes if arrived is not None else 0,
                transfer_s=arrived.transfer_s if arrived is not None else 0.0,
                verify_s=arrived.verify_s if arrived is not None else 0.0,
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
                link=done.engine,
                form=done.form,
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
        message=error.message[:REASON_CHARS_MAX],  # a chat template may repeat a client's words
        http_status=error.http_status,
        retryable=error.retryable,
        fault=error.fault,
        param=error.param,
    )


def crash_of(error: Exception) -> NeuronDiError:
    """A bug would be met on any worker; a thread that the system refuses us another may get."""
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return WorkerFailed("this worker can start no further thread: a limit is reached here")
    return LocalProtocolError("internal error")

"""Names for the plain values that cross module borders."""

from typing import Literal, NewType

RequestId = NewType("RequestId", str)  # the client's request, the same in every attempt
WorkerId = NewType("WorkerId", str)  # stable name of a worker, e.g. "prefill-0"
WORKER_ID_PATTERN = r"[A-Za-z0-9._-]{1,64}"  # it stands in a header of answers
Incarnation = NewType("Incarnation", str)  # random, one per process lifetime of a worker
BlockId = NewType("BlockId", int)  # index of a block in one worker's KV pool

Role = Literal["prefill", "decode", "both"]
WorkerState = Literal["starting", "ready", "draining"]
FinishReason = Literal["stop", "length", "cancelled", "error"]

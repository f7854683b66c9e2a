"""Which errors of a device's calls mean that it cannot be used any more.

Our bindings raise NrtWorkerError. PyTorch and NxD Inference raise errors of their own, whose text
has the runtime's status: by name, as in "NRT_EXEC_HW_ERR_COLLECTIVES", or as "status_code=1200".

So far this has run on a simulator of libnrt only.
"""

import re

from neuron_di.errors import BackendLost
from neuron_di_bindings.nrt.status import NrtError, NrtStatus, NrtWorkerError, error_of

_NAME = re.compile(r"\bNRT_([A-Z_]+)\b")
_NUMBER = re.compile(r"\bstatus(?:[ _]code)?\s*[=:]?\s*([0-9]{1,4})\b", re.IGNORECASE)
# Others number what went wrong, too ("HTTP status 5"), but not from here on: smaller numbers count
# where the text names the runtime.
_OURS_MIN = 1000
_IS_OF_RUNTIME = re.compile(r"\bnrt|neuron_rt|status_code", re.IGNORECASE)
# For a device that served before, as all of these did.
_ENDED = (NrtStatus.UNINITIALIZED, NrtStatus.CLOSED)


def lost_by(error: BaseException) -> BackendLost | None:
    """The loss that an error of a device's call means; None: another call may succeed."""
    if isinstance(error, BackendLost):
        return error
    if isinstance(error, NrtWorkerError) or (
        isinstance(error, NrtError) and error.status in _ENDED
    ):
        return BackendLost(f"the Neuron device failed: {error}")
    if isinstance(error, TimeoutError):
        return BackendLost(f"the Neuron device does not answer: {error}")
    if not isinstance(error, RuntimeError):
        return None
    for status in _statuses_in(str(error)):
        found = error_of("nrt_execute", status, status.name)
        if isinstance(found, NrtWorkerError) or status in _ENDED:
            return BackendLost(f"the Neuron device failed: NRT_{status.name}")
    return None


def _statuses_in(text: str) -> list[NrtStatus]:
    named = [status for name in _NAME.findall(text) for status in _called(name)]
    known = {int(status) for status in NrtStatus}
    numbers = [int(number) for number in _NUMBER.findall(text)]
    least = 0 if _IS_OF_RUNTIME.search(text) else _OURS_MIN
    found = named + [NrtStatus(each) for each in numbers if each in known and each >= least]
    return [status for status in found if status is not NrtStatus.SUCCESS]


def _called(name: str) -> list[NrtStatus]:
    """The status of a name: in full, as EXEC_HW_ERR_DMA_ABORT, or shortened to what our table has.
    None for a name that we do not know."""
    fitting = [each for each in NrtStatus.__members__ if f"_{name}".endswith(f"_{each}")]
    return [NrtStatus[max(fitting, key=len)]] if fitting else []

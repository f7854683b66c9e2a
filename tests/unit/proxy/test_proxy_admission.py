import asyncio

import pytest

from neuron_di.errors import CapacityError
from neuron_di_proxy.admission import Admission


async def test_places_are_counted_and_come_back():
    admission = Admission(2)
    with admission.admit(), admission.admit():
        assert admission.num_running == 2
        with pytest.raises(CapacityError, match="2 requests"), admission.admit():
            pass
    assert admission.num_running == 0
    with pytest.raises(ZeroDivisionError), admission.admit():
        raise ZeroDivisionError
    assert (admission.num_running, admission.num_admitted) == (0, 3)


async def test_draining_waits_for_the_last_request():
    admission = Admission(2)
    with admission.admit():
        admission.drain()
        with pytest.raises(CapacityError, match="shutting down"), admission.admit():
            pass
        idle = asyncio.create_task(admission.wait_idle())
        await asyncio.sleep(0)
        assert not idle.done()
    await idle

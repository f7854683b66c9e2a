"""An admission as tests make it."""

from neuron_di.config import LimitOptions
from neuron_di_proxy.admission import Admission


def admission_of(places, queue=100):
    return Admission(LimitOptions(requests_max=places, queue_max=queue), lambda: 1)

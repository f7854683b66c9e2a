"""Two processes of one host, as it were: each is a copy of the simulator with cores of its own."""

from nrt_steering import Steering, until

from neuron_di_bindings.nrt import NrtRuntime, SendReceive

HERE = "127.0.0.1"
P, D = 0, 3  # the host's numbers; D is core 1 of its process


class Side:
    """One of two processes, as it were."""

    def __init__(self, library):
        self.sim = Steering(library)
        self.runtime = NrtRuntime(library).init()
        self.both = SendReceive(self.runtime)


def connected(sides):
    sending, receiving = (
        sides[0].both.connect(HERE, D, P),
        sides[1].both.accept(HERE, P, D),
    )
    until(sending.is_connected)
    until(receiving.is_connected)
    return sending, receiving


def count_of(request):
    """Bytes of a request, when it is over."""
    found = []

    def is_over():
        count = request.test()
        found.append(count)
        return count is not None

    until(is_over)
    return found[-1]

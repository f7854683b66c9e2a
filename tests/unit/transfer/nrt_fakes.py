"""A device that answers what a test says, beneath a channel."""

from neuron_di.transfer.nrt_channel import Channel
from neuron_di_bindings.nrt import NrtRequestError, NrtRetry, NrtStatus, NrtWorkerError

LATE = NrtWorkerError("test_request", NrtStatus.TIMEOUT, "NRT_TIMEOUT")
BUSY = NrtRetry("send_tensor", NrtStatus.RESOURCE, "NRT_RESOURCE")
REFUSED = NrtRequestError("send_tensor", NrtStatus.FAILURE, "NRT_FAILURE")
DEAD = NrtWorkerError("send_tensor", NrtStatus.HW_ERROR, "NRT_HW_ERROR")


class Request:
    """Answers what the test says, in order; then that it is not done."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.num_tests = 0

    def is_done(self):
        self.num_tests += 1
        answer = self.answers.pop(0) if self.answers else False
        if isinstance(answer, Exception):
            raise answer
        return answer


class Device:
    """`takes` are what each post gives: a request, or an error."""

    def __init__(self, *takes):
        self.takes = list(takes)
        self.posts = []  # offsets of messages, by post

    def post(self, messages):
        taken = self.takes.pop(0)
        if isinstance(taken, Exception):
            raise taken
        self.posts.append([message.offset for message in messages])
        return taken


def channel_of(*takes, pending_max=8, **more):
    device = Device(*takes)
    channel = Channel(device.post, pending_max, **more)
    return channel, device.posts

"""Async tests on virtual time: hours take no time."""

import functools
import logging

from neuron_di.testing.virtual_loop import VirtualLoop


def virtual(test):
    """Run an async test on virtual time. Exceptions that nobody asked for fail it."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        loop = VirtualLoop(callbacks_max=10**6)
        try:
            loop.run_until_complete(test(*args, **kwargs))
            assert loop.errors == []
        finally:
            loop.close()
            logging.disable(logging.NOTSET)  # which closing turned off

    return run

"""What workers say of a model is found once for each snapshot of the directory."""

import msgspec
import pytest

from benchmarks.proxy_stub import status
from neuron_di.wire import SamplingDefaults
from neuron_di_proxy.known_models import ModelNotFound
from neuron_di_proxy.model_traits import ModelTraits, TraitsBook
from neuron_di_proxy.request_id import fresh_id


class Directory:
    def __init__(self, *records):
        self.records = records

    def workers(self):
        return self.records


def test_traits_are_found_once_while_nothing_changes():
    directory = Directory(status("prefill", 1).record, status("decode", 2).record)
    traits = TraitsBook(directory)
    first = traits.of("stub")
    assert first.num_vocab == 1 << 17
    assert traits.of("stub") is first


def test_traits_change_with_the_workers():
    directory = Directory()
    traits = TraitsBook(directory)
    assert traits.of("stub") == ModelTraits()  # some may come soon
    directory.records = (status("decode", 1).record,)
    assert traits.of("stub").num_vocab == 1 << 17
    with pytest.raises(ModelNotFound):
        traits.of("another")
    found = traits.of("stub")
    directory.records = ()
    assert traits.of("stub") == found  # it may only be starting again
    directory.records = (msgspec.structs.replace(status("decode", 1).record, model="another"),)
    assert traits.of("stub") == found
    with pytest.raises(ModelNotFound):
        traits.of("none")


def test_one_worker_that_says_how_tokens_are_drawn_is_enough():
    """Others may have been told to keep to OpenAI's."""
    defaults = SamplingDefaults(temperature=0.6)
    told = msgspec.structs.replace(status("decode", 2).record, sampling_defaults=defaults)
    directory = Directory(status("prefill", 1).record, told)
    assert TraitsBook(directory).of("stub").sampling_defaults == {"temperature": 0.6}


def test_ids_of_requests_are_all_different_and_32_hex_digits():
    ids = {fresh_id() for _ in range(2000)}  # more than are drawn at once
    assert len(ids) == 2000
    assert all(len(each) == 32 and int(each, 16) >= 0 for each in ids)

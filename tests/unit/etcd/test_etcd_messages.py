"""The bytes of messages, and what is said where their packages are missing."""

import subprocess
import sys

import pytest

from neuron_di.etcd import messages
from neuron_di.etcd.key_value import KeyRange


def test_the_bytes_are_etcds():
    put = messages.PutRequest(key=b"k", value=b"v", lease=300)
    assert put.SerializeToString() == b"\n\x01k\x12\x01v\x18\xac\x02"
    create = messages.WatchCreateRequest(key=b"k", progress_notify=True, fragment=True)
    request = messages.WatchRequest(create_request=create)
    assert request.SerializeToString() == b"\n\x07\n\x01k \x01@\x01"
    progress = messages.WatchRequest(progress_request=messages.WatchProgressRequest())
    assert progress.SerializeToString() == b"\x1a\x00"


def test_answers_are_read_and_unknown_fields_skipped():
    header = b"\n\x04\x08\x07\x18\x05"  # cluster 7, revision 5
    answer = messages.RANGE.response.FromString(header + b"\x12\x06\n\x01k*\x01v \x01\x7a\x01x")
    assert (answer.header.cluster_id, answer.header.revision) == (7, 5)
    assert (answer.kvs[0].key, answer.kvs[0].value, answer.count) == (b"k", b"v", 1)


@pytest.mark.parametrize(
    ("prefix", "first", "end"),
    [
        (b"/a/", b"/a/", b"/a0"),
        (b"a\xff", b"a\xff", b"b"),
        (b"\xff\xff", b"\xff\xff", b"\0"),
        (b"", b"\0", b"\0"),
    ],
)
def test_the_end_of_a_prefix(prefix, first, end):
    assert KeyRange.prefix(prefix) == KeyRange(first, end)


@pytest.mark.parametrize("module", ["grpc", "google.protobuf"])
def test_a_package_that_is_missing_is_named_with_its_extra(module):
    script = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "import neuron_di.etcd\n"  # needs neither
        "from neuron_di.errors import ConfigError\n"
        "try:\n    import neuron_di.etcd.client\n"
        "except ConfigError as error:\n    print(error.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert module in done.stdout
    assert "pip install '.[etcd]'" in done.stdout


def test_a_proxy_without_etcd_loads_no_grpc():
    script = (
        "import sys, neuron_di_proxy.process, neuron_di.etcd\n"
        "print([name for name in ('grpc', 'google.protobuf') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"

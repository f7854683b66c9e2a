"""What clients are told of a failure: OpenAI's document, when to come back, and no more."""

import json
import re

import pytest

from neuron_di import errors
from neuron_di.errors import (
    BadRequest,
    CapacityError,
    Forbidden,
    NeuronDiError,
    PeerGone,
    PeerTimeout,
    RateLimited,
    TooLarge,
    Unauthorized,
    WorkerFailed,
)
from neuron_di.wire import Failed
from neuron_di_proxy.failure import (
    LegFailed,
    RequestTimeout,
    error_body,
    failure_of,
    retry_after_of,
)

PLACE = re.compile(r"/srv|/proc|10\.1\.2\.3|fd00|internal|7000|tcp:|http:|Traceback|\.py")


def told(error):
    document = json.loads(error_body(failure_of(error)))
    assert set(document) == {"error"}
    return document["error"]


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (BadRequest("bad", param="n"), 400, "invalid_request_error", "invalid_request"),
        (Unauthorized("no key"), 401, "invalid_request_error", "invalid_api_key"),
        (Forbidden("not this"), 403, "invalid_request_error", "permission_denied"),
        (TooLarge("large"), 413, "invalid_request_error", "request_too_large"),
        (RateLimited("more", retry_after_s=3), 429, "rate_limit_error", "rate_limit_exceeded"),
        (CapacityError("full"), 503, "server_error", "over_capacity"),
        (WorkerFailed("failed"), 500, "server_error", "worker_failed"),
        (PeerGone("gone"), 502, "server_error", "peer_gone"),
        (PeerTimeout("slow"), 504, "server_error", "peer_timeout"),
        (RequestTimeout("late"), 504, "server_error", "request_timeout"),
        (ValueError("secret"), 500, "server_error", "internal_error"),
    ],
)
def test_every_body_has_all_four_keys_and_the_type_of_its_status(error, status, kind, code):
    document = told(error)
    assert failure_of(error).http_status == status
    assert set(document) == {"message", "type", "param", "code"}
    assert (document["type"], document["code"]) == (kind, code)
    assert document["param"] == ("n" if status == 400 else None)
    assert document["message"] == ("internal error" if status == 500 and code != "worker_failed"
                                   else error.message)  # fmt: skip


def server_errors():
    classes = [
        found
        for found in vars(errors).values()
        if isinstance(found, type) and issubclass(found, NeuronDiError) and found.http_status >= 500
    ]
    assert len(classes) > 15
    return sorted(classes, key=lambda found: found.__name__)


@pytest.mark.parametrize("kind", server_errors(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("message", "kept"),
    [
        ("worker d1 at 10.1.2.3:7000 is gone", "worker d1 at (hidden) is gone"),
        ("cannot map the pool of process 13159", "cannot map the pool of process (hidden)"),
        ("no answer from tcp://10.1.2.3:7000 within 3 s", "no answer from (hidden) within 3 s"),
        ("at [fd00::1:2]:7000, it is silent", "at (hidden), it is silent"),
        ("d1 is not at fd00::7:7000: another is", "d1 is not at (hidden): another is"),
        ("at ::1, or at fd00:1:2:3:4:5:6:7", "at (hidden), or at (hidden)"),
        ("at ::ffff:10.1.2.3:7000, or at fd00::", "at (hidden), or at (hidden)"),
        ("from fe80::1%eth0 at 12:30:45", "from (hidden) at 12:30:45"),
        ("expired (_ssl.c:1006), at d1.local:70", "expired (_ssl.c:1006), at (hidden)"),
        ("connect to ipv6:%5Bfd00::1%5D:7000: refused", "connect to (hidden) refused"),
        ("no link at worker.internal:7000: refused", "no link at (hidden): refused"),
        ("ask http://worker.internal/status?x=1", "ask (hidden)"),
        ("cannot map /proc/71/fd/9: denied", "cannot map (hidden): denied"),
        ("cannot read '/srv/models/x.safetensors'", "cannot read '(hidden)'"),
        ("bound to 10.1.2.3", "bound to (hidden)"),
    ],
)
def test_b28_a_failure_of_ours_does_not_say_where_things_are(kind, message, kept):
    document = told(kind(message))
    assert document["message"] == kept
    assert not PLACE.search(document["message"])


@pytest.mark.parametrize(
    "message",
    [
        "no decode worker is ready for model 'org/name-7b': d2 is gone; d3 failed 5/5 times",
        "token 3 came at 12:05 where 4 was due",
        "a limit of 3: 4 came; std::bad_alloc",
        "prefill and/or decode",
    ],
)
def test_a_failure_keeps_what_is_no_place(message):
    assert told(CapacityError(message))["message"] == message


def test_b28_what_a_worker_says_of_its_failure_is_no_exception():
    failed = Failed(
        code="kv_error", message="lost /srv/kv at 10.1.2.3:7000", http_status=502, retryable=True
    )
    assert told(LegFailed(failed))["message"] == "lost (hidden) at (hidden)"


def test_b28_an_error_nobody_foresaw_says_nothing():
    prompt = "CANARY"
    error = KeyError(prompt)
    error.add_note(prompt)
    assert prompt not in json.dumps(told(error))


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (RateLimited("more", retry_after_s=0.2), 1),
        (RateLimited("more", retry_after_s=12.1), 13),
        (CapacityError("full", retry_after_s=59.9), 60),
        (CapacityError("full"), 1),
        (failure_of(CapacityError("full", retry_after_s=59.9)), 1),
        (BadRequest("bad"), None),
        (PeerGone("gone"), None),
        (ValueError(), None),
    ],
)
def test_when_to_come_back(error, seconds):
    assert retry_after_of(error) == seconds

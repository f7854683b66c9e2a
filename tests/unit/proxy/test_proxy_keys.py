"""Keys: who gets in, that it takes everybody the same work, and a file that changes."""

import errno
import hmac
import logging
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hand_clock import HandClock
from key_files import write_key_file

from neuron_di.clock import use_clock
from neuron_di.errors import ConfigError, Forbidden, Unauthorized
from neuron_di_proxy import keys as keys_module
from neuron_di_proxy.key_file import KeyRecord, make_key, read_key_file
from neuron_di_proxy.keys import OPEN_PATHS, OPERATOR_PATHS, Keys, authorize
from neuron_di_proxy.tenant import EVERYBODY

PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/receipts/some",
    "/tokenize",
    "/detokenize",
    "/version",
    "/openapi.json",
    "/status",
    "/metrics",
    "/debug",
    "/health/",
    "/HEALTH",
    "/health/../metrics",
    "//health",
    "/",
    "",
)


@pytest.fixture
def clock():
    with use_clock(clock := HandClock(1000.0, may_sleep=False)):
        yield clock


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "keys.toml"


def add_key(path, tenant="alice", **fields):
    """Put one more key into the file. Returns its text."""
    keys = read_key_file(path) if path.exists() else {}
    key_id, text, digest = make_key()
    write_key_file(path, keys | {key_id: KeyRecord(tenant=tenant, sha256=digest, **fields)})
    return text


def flipped(text):
    """The same but for the last character."""
    return text[:-1] + ("A" if text[-1] != "A" else "B")


def test_a_key_names_its_tenant_and_limits(path, clock):
    alice = add_key(path, "alice", requests_max=3, weight=2.5, max_tokens=99)
    operator = add_key(path, "op", operator=True)
    keys = Keys(str(path))
    tenant = keys.tenant_of(f"Bearer {alice}")
    assert (tenant.name, tenant.requests_max, tenant.weight) == ("alice", 3, 2.5)
    assert (tenant.max_tokens, tenant.is_operator) == (99, False)
    assert keys.tenant_of(f"bearer {operator}").is_operator


def test_without_a_file_everybody_may_come(clock):
    keys = Keys(None)
    assert keys.tenant_of(None) is EVERYBODY
    assert authorize(keys, "/metrics", {}) is EVERYBODY


def wrong_headers(text):
    key_id = text.split("-")[1]
    return [
        None,
        "",
        "Bearer",
        "Bearer ",
        text,
        f"Basic {text}",
        f"Bearer  {text}",
        f"Bearer {text} ",
        f"Bearer {text}\n",
        f"Bearer {flipped(text)}",
        f"Bearer {text[:-1]}",
        f"Bearer {text}A",
        f"Bearer {text.upper()}",
        f"Bearer ndi-{key_id}-",
        f"Bearer ndi-{'0' * 12}-{text.split('-', 2)[2]}",
        f"Bearer {text.split('-', 2)[2]}",
        "Bearer " + "é" * 40,
        "Bearer " + "x" * 10_000,
    ]


@pytest.mark.parametrize("index", range(18))
def test_nothing_else_gets_in_and_no_answer_shows_a_key(path, clock, index):
    text = add_key(path)
    header = wrong_headers(text)[index]
    with pytest.raises(Unauthorized) as refused:
        Keys(str(path)).tenant_of(header)
    assert (refused.value.http_status, refused.value.code) == (401, "invalid_api_key")
    secret = text.split("-", 2)[2]
    assert secret[:20] not in refused.value.message
    assert not header or header not in refused.value.message


def test_b22_every_answer_takes_the_same_work(path, clock, monkeypatch):
    """Counted, not timed: one digest and one comparison of two digests of equal length."""
    text = add_key(path)
    expired = add_key(path, "old", expires=datetime.now(UTC) - timedelta(days=1))
    keys = Keys(str(path))
    digests, compared = [], []
    real_digest, real_compare = keys_module.digest_of, hmac.compare_digest

    def digest_of(secret):
        digests.append(real_digest(secret))
        return digests[-1]

    def compare_digest(one, other):
        compared.append((len(one), len(other)))
        return real_compare(one, other)

    monkeypatch.setattr(keys_module, "digest_of", digest_of)
    monkeypatch.setattr(keys_module.hmac, "compare_digest", compare_digest)
    asked = [f"Bearer {text}", f"Bearer {expired}", *wrong_headers(text)]
    outcomes = []
    for header in asked:
        try:
            outcomes.append(keys.tenant_of(header).name)
        except Unauthorized:
            outcomes.append(None)
    assert outcomes == ["alice"] + [None] * (len(asked) - 1)
    assert len(digests) == len(asked)
    assert compared == [(64, 64)] * len(asked)


@pytest.mark.parametrize("name", ["x-api-key", "api-key", "cookie", "proxy-authorization"])
def test_no_other_header_counts(path, clock, name):
    text = add_key(path)
    with pytest.raises(Unauthorized):
        authorize(Keys(str(path)), "/v1/models", {name: f"Bearer {text}"})


def test_b23_only_health_is_open(path, clock):
    headers = {"authorization": f"Bearer {add_key(path)}"}
    keys = Keys(str(path))
    for open_path in OPEN_PATHS:
        assert authorize(keys, open_path, {}) is EVERYBODY
    for closed in PATHS:
        with pytest.raises(Unauthorized):
            authorize(keys, closed, {})
        if closed not in OPERATOR_PATHS:
            assert authorize(keys, closed, headers).name == "alice"
    assert {"/health", "/live", "/ping", "/ready"} == OPEN_PATHS


def test_what_shows_all_tenants_is_for_operators(path, clock):
    alice = {"authorization": f"Bearer {add_key(path)}"}
    operator = {"authorization": f"Bearer {add_key(path, 'op', operator=True)}"}
    keys = Keys(str(path))
    for shown in OPERATOR_PATHS:
        with pytest.raises(Forbidden) as refused:
            authorize(keys, shown, alice)
        assert refused.value.http_status == 403
        assert authorize(keys, shown, operator).name == "op"


def test_a_key_expires_while_the_proxy_runs(path, clock):
    text = add_key(path, expires=datetime.fromtimestamp(clock.unix_s() + 10, UTC))
    keys = Keys(str(path))
    clock.now_s += 9.9
    assert keys.tenant_of(f"Bearer {text}").name == "alice"
    clock.now_s += 0.1
    with pytest.raises(Unauthorized, match="expired"):
        keys.tenant_of(f"Bearer {text}")
    with pytest.raises(Unauthorized, match="not valid"):  # who has no secret learns nothing
        keys.tenant_of(f"Bearer {flipped(text)}")


@pytest.mark.parametrize("scheme", ["", "Basic ", "bearer:"])
def test_who_leaves_the_scheme_out_is_told_how_a_key_is_sent(path, scheme):
    text = add_key(path)
    with pytest.raises(Unauthorized, match="Authorization: Bearer KEY"):
        Keys(str(path)).tenant_of(f"{scheme}{text}")


def test_a_change_of_the_file_is_seen_within_a_second(path, clock):
    alice = add_key(path, "alice")
    keys = Keys(str(path))
    bob = add_key(path, "bob", requests_max=1)
    with pytest.raises(Unauthorized):
        keys.tenant_of(f"Bearer {bob}")
    clock.now_s += 1
    assert keys.tenant_of(f"Bearer {bob}").requests_max == 1
    kept = {key: record for key, record in read_key_file(path).items() if record.tenant == "bob"}
    write_key_file(path, kept)
    clock.now_s += 1
    with pytest.raises(Unauthorized):
        keys.tenant_of(f"Bearer {alice}")
    assert keys.tenant_of(f"Bearer {bob}").name == "bob"


def test_the_file_is_looked_at_once_a_second_and_read_when_it_changed(path, clock, monkeypatch):
    text = add_key(path)
    keys = Keys(str(path))
    looks, reads = [], []
    monkeypatch.setattr(
        keys_module, "look_at", lambda path, real=keys_module.look_at: looks.append(1) or real(path)
    )
    monkeypatch.setattr(
        keys_module, "read_key_file", lambda path: reads.append(1) or read_key_file(path)
    )
    for _ in range(100):
        clock.now_s += 0.1
        keys.tenant_of(f"Bearer {text}")
    assert (9 <= len(looks) <= 11, len(reads)) == (True, 0)
    add_key(path, "bob")
    for _ in range(20):
        clock.now_s += 0.1
        keys.tenant_of(f"Bearer {text}")
    assert len(reads) == 1


def test_a_changed_file_that_could_not_be_opened_is_looked_at_again(
    path, clock, caplog, monkeypatch
):
    """Else a key that was taken out of it would be good for ever."""
    alice = add_key(path, "alice")
    keys = Keys(str(path))
    kept = {key: record for key, record in read_key_file(path).items() if record.tenant == "bob"}
    write_key_file(path, kept)

    def open_nothing(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with caplog.at_level(logging.ERROR), monkeypatch.context() as patch:
        patch.setattr(os, "open", open_nothing)
        for _ in range(3):
            clock.now_s += 1
            assert keys.tenant_of(f"Bearer {alice}").name == "alice"
    assert [record.message for record in caplog.records] == ["keys_not_read"]
    clock.now_s += 1
    with pytest.raises(Unauthorized):
        keys.tenant_of(f"Bearer {alice}")


@pytest.mark.parametrize("damage", ["broken", "gone", "writable", "fifo", "unknown field"])
def test_a_file_that_is_no_good_leaves_the_keys_as_they_are(path, clock, caplog, damage):
    text = add_key(path)
    keys = Keys(str(path))
    good = path.read_bytes()
    if damage == "broken":
        path.write_text("[keys.")
    elif damage == "writable":
        path.chmod(0o666)
    elif damage == "unknown field":
        path.write_bytes(good + b"surprise = 1\n")
    else:
        path.unlink()
        if damage == "fifo":
            os.mkfifo(path, 0o600)
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            clock.now_s += 1
            assert keys.tenant_of(f"Bearer {text}").name == "alice"
    assert [record.message for record in caplog.records] == ["keys_not_read"]
    path.unlink(missing_ok=True)
    path.touch(0o600)
    clock.now_s += 1
    with pytest.raises(Unauthorized):  # a file without keys is a good one: nobody gets in
        keys.tenant_of(f"Bearer {text}")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("keys = 1", "cannot be understood"),
        ("\xff", "cannot be understood"),
        ("[keys.zz]\ntenant='a'\nsha256='%s'" % ("0" * 64), "12 hexadecimal"),
        ("[keys.000000000000]\ntenant='a'\nsha256='CANARY'", "cannot be understood"),
        ("[keys.000000000000]\ntenant='a b'\nsha256='%s'" % ("0" * 64), "cannot be understood"),
        (
            "[keys.000000000000]\ntenant='a'\nsha256='{0}'\n"
            "[keys.000000000001]\ntenant='a'\nsha256='{0}'\nweight=2.0".format("0" * 64),
            "different limits",
        ),
        (
            f"[keys.000000000000]\ntenant='a'\nsha256='{'0' * 64}'\nexpires=2030-01-01T00:00:00",
            "cannot be understood",  # of which time zone
        ),
    ],
)
def test_a_proxy_does_not_start_on_a_file_that_is_no_good(path, content, said):
    path.touch(0o600)
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=said) as refused:
        Keys(str(path))
    assert "CANARY" not in refused.value.message


def test_a_file_that_others_may_write_or_that_is_not_there_is_refused_with_the_mend(path):
    with pytest.raises(ConfigError, match="neuron-di key create"):
        Keys(str(path))
    add_key(path)
    path.chmod(0o620)
    with pytest.raises(ConfigError, match="chmod 600"):
        Keys(str(path))
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match="regular file"):
        Keys(str(path))


def test_a_file_that_is_there_and_cannot_be_read_is_not_to_be_made(path):
    path.symlink_to(path)
    with pytest.raises(ConfigError, match="cannot read the key file") as refused:
        Keys(str(path))
    assert "create" not in refused.value.message


def test_a_file_that_others_may_read_is_warned_of(path, caplog):
    add_key(path)
    with caplog.at_level(logging.WARNING):
        Keys(str(path))
        assert not caplog.records
        path.chmod(0o644)
        Keys(str(path))
    assert [record.message for record in caplog.records] == ["keys_readable"]


def test_what_is_written_is_read_again_and_holds_no_secret(path):
    text = add_key(
        path,
        expires=datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC),
        weight=0.25,
        tokens_per_minute=1 << 40,
        operator=True,
    )
    [(key_id, record)] = read_key_file(path).items()
    assert text.split("-", 2)[1] == key_id
    assert record.expires == datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)
    assert (record.weight, record.tokens_per_minute, record.operator) == (0.25, 1 << 40, True)
    assert text.split("-", 2)[2] not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_second_writer_at_once_is_refused(path):
    add_key(path)
    before = path.read_bytes()
    path.with_name("keys.toml.new").touch()
    with pytest.raises(ConfigError, match="another command"):
        add_key(path, "bob")
    assert path.read_bytes() == before

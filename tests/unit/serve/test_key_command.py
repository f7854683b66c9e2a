"""`neuron-di key`, as an operator types it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from neuron_di.cli import main
from neuron_di_proxy.key_file import (
    KEYS_MAX,
    KeyRecord,
    changing_key_file,
    make_key,
    read_key_file,
)
from neuron_di_proxy.keys import Keys


@pytest.fixture
def file(tmp_path):
    return str(tmp_path / "keys.toml")


def run(capsys, *arguments):
    """(exit code, standard output, standard error)."""
    code = main(["key", *arguments])
    said = capsys.readouterr()
    return code, said.out.strip(), said.err.strip()


def test_a_key_is_made_listed_and_revoked(capsys, file):
    code, text, _ = run(capsys, "create", file, "alice", "--requests-max=4", "--expires-days=9")
    assert code == 0
    tenant = Keys(file).tenant_of(f"Bearer {text}")
    assert (tenant.name, tenant.requests_max, tenant.is_operator) == ("alice", 4, False)
    _, listed, _ = run(capsys, "list", file)
    key_id, secret = text.split("-", 2)[1:]
    assert key_id in listed
    assert "requests_max=4" in listed
    assert secret not in listed
    assert run(capsys, "revoke", file, key_id) == (0, f"revoked: {key_id}", "")
    assert key_id not in run(capsys, "list", file)[1]


def test_a_second_key_has_its_tenants_limits(capsys, file):
    run(capsys, "create", file, "op", "--operator", "--weight=3", "--expires-days=1")
    _, text, _ = run(capsys, "create", file, "op")
    tenant = Keys(file).tenant_of(f"Bearer {text}")
    assert (tenant.weight, tenant.is_operator) == (3.0, True)
    assert run(capsys, "list", file)[1].count("never") == 1  # it does not expire with the first
    code, _, words = run(capsys, "create", file, "op", "--weight=2")
    assert (code, "has keys already" in words) == (2, True)
    assert run(capsys, "revoke", file, "op")[1].count(",") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["create", "FILE", "two words"], "tenant"),
        (["create", "FILE", "a", "--weight=-1"], "weight"),
        (["create", "FILE", "a", "--weight=nan"], "weight"),
        (["create", "FILE", "a", "--requests-max=0"], "--requests-max"),
        (["create", "FILE", "a", "--requests-mix=1"], "--requests-max"),
        (["create", "FILE", "a", "--expires-days=1e99"], "expires-days"),
        (["create", "FILE", "a", "--expires-days=0"], "expires-days"),
        (["list", "FILE"], "neuron-di key create"),
        (["revoke", "FILE", "a"], "cannot read"),
        (["craete", "FILE"], "key: unknown verb 'craete'; the nearest valid one is create"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(capsys, file, arguments, said):
    code, output, words = run(capsys, *(file if each == "FILE" else each for each in arguments))
    assert (code, output) == (2, "")
    assert said in words
    assert "\n" not in words


def test_a_reader_that_has_seen_enough_is_no_failure(tmp_path, capsys):
    file = str(tmp_path / "keys.toml")
    for number in range(3):
        assert main(["key", "create", file, f"tenant-{number}"]) == 0
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "neuron_di", "key", "list", file]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_name_that_none_may_have_is_refused_in_words(capsys, file):
    code, _, error = run(capsys, "create", file, "two words")
    assert code == 2
    assert "1 to 64 letters" in error
    assert not os.path.exists(file)


def test_a_limit_that_none_may_have_is_named_by_its_flag(capsys, file):
    code, _, error = run(capsys, "create", file, "alice", "--tokens-per-minute=0")
    assert code == 2
    assert error.endswith("--tokens-per-minute: Expected int >= 1")
    assert not os.path.exists(file)


def write_keys(path: Path) -> None:
    key_id, _, digest = make_key()
    with changing_key_file(path, may_be_new=True) as keys:
        keys[key_id] = KeyRecord(tenant="team", sha256=digest)


def test_a_key_too_many_leaves_the_file_as_it_can_be_read(capsys, file):
    with changing_key_file(Path(file), may_be_new=True) as keys:
        record = KeyRecord(tenant="alice", sha256="0" * 64)
        keys |= {f"{number:012x}": record for number in range(KEYS_MAX)}
    code, text, words = run(capsys, "create", file, "alice")
    assert (code, text) == (2, "")
    assert f"more than {KEYS_MAX}" in words
    assert len(read_key_file(Path(file))) == KEYS_MAX


def test_who_writes_at_the_same_time_brings_nothing_back(tmp_path, capsys):
    """A command that has read the keys before another one revoked some would write them again."""
    path = tmp_path / "keys.toml"
    write_keys(path)
    with changing_key_file(path) as keys:
        keys.clear()
        code, _, words = run(capsys, "create", str(path), "other")
        assert (code, "another command is writing" in words) == (2, True)
    assert read_key_file(path) == {}
    assert run(capsys, "create", str(path), "other")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["keys.toml"]


def test_commands_at_the_same_time_lose_no_key_that_was_shown(tmp_path):
    file, command = str(tmp_path / "keys.toml"), [sys.executable, "-m", "neuron_di", "key"]
    running = [
        subprocess.Popen([*command, "create", file, f"tenant-{number}"],
                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for number in range(6)
    ]  # fmt: skip
    shown = [process.communicate(timeout=60)[0].strip() for process in running]
    ids = [text.split("-")[1] for text in shown if text]
    assert ids
    assert sorted(read_key_file(Path(file))) == sorted(ids)


def test_a_link_to_the_keys_stays_one(tmp_path):
    path, link = tmp_path / "keys.toml", tmp_path / "link.toml"
    write_keys(path)
    link.symlink_to(path)
    assert main(["key", "revoke", str(link), "team"]) == 0
    assert link.is_symlink()
    assert read_key_file(path) == {}


def test_the_keys_stay_whose_they_are(tmp_path):
    """Else the proxy could not read that one was revoked."""
    path = tmp_path / "keys.toml"
    write_keys(path)
    assert path.stat().st_mode & 0o777 == 0o600
    owner = (path.stat().st_uid, path.stat().st_gid)
    if os.geteuid() == 0:
        owner = (65534, 65534)
        os.chown(path, *owner)
    path.chmod(0o640)
    assert main(["key", "revoke", str(path), "team"]) == 0
    after = path.stat()
    assert ((after.st_uid, after.st_gid), after.st_mode & 0o777) == (owner, 0o640)
    path.chmod(0o644)
    assert main(["key", "create", str(path), "other"]) == 0
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("redirected", "code", "words"),
    [
        (">/dev/full", "1", "a key was made, and nobody saw it: No space left on device"),
        (">&-", "0", ""),  # as was asked for
        ("| (exec <&-; sleep 2)", "1", "a key was made, and nobody saw it: Broken pipe"),
    ],
)
def test_a_key_that_nobody_saw_is_told(tmp_path, redirected, code, words):
    command = f"'{sys.executable}' -m neuron_di key create '{tmp_path}/keys.toml' team"
    script = f"{command} {redirected}; echo ${{PIPESTATUS[0]}} >&2"
    ended = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    *said, last = ended.stderr.splitlines()
    assert last == code
    assert words in "".join(said)
    assert len(said) == bool(words), "one line"


@pytest.mark.parametrize(
    ("into", "reason"),
    [
        ('exec "$@" >/dev/full', "No space left on device"),
        ('ulimit -f 0; exec "$@" >out', "File too large"),
    ],
)
def test_a_list_that_there_is_no_room_for_is_a_line(tmp_path, into, reason):
    path = tmp_path / "keys.toml"
    write_keys(path)
    ended = subprocess.run(
        ["sh", "-c", into, "sh", sys.executable, "-m", "neuron_di", "key", "list", str(path)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr == f"neuron-di: cannot write: {reason}\n"

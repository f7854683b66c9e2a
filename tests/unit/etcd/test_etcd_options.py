"""Options of etcd: what may be given together, and what of them is ever shown."""

import shutil
import subprocess

import pytest

from neuron_di.config import (
    EtcdOptions,
    FlagParser,
    ProxyOptions,
    ServeOptions,
    WorkerOptions,
    add_flags,
    flags_of,
    load_options,
)
from neuron_di.errors import ConfigError
from neuron_di.etcd import open_registry
from neuron_di.etcd.security import Security, security_of

PASSWORD = "correct-horse-7"
ETCD = ("etcd-1:2379",)


def load(options_class, *flags, environ=None):
    parser = FlagParser(prog="test")
    add_flags(parser, options_class)
    return load_options(options_class, parser.parse_args(flags), environ or {})


@pytest.fixture
def password_file(tmp_path):
    path = tmp_path / "password"
    path.write_text(PASSWORD + "\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("options_class", [ServeOptions, ProxyOptions, WorkerOptions])
def test_every_command_has_them_and_hands_them_on(options_class, password_file, tmp_path):
    words = ["m"] if options_class is not ProxyOptions else []
    words += ["--role=decode"] if options_class is WorkerOptions else []
    options = load(
        options_class,
        *words,
        "--etcd=10.0.0.1:2379,[::1]:2379,etcd-3:2379",
        "--etcd-prefix=/site/a",
        f"--etcd-ca={tmp_path}/ca.pem",
        "--etcd-user=worker",
        "--etcd-ttl-s=3",
        environ={"NEURON_DI_ETCD_PASSWORD_FILE": str(password_file)},
    )
    assert options.etcd.etcd == ("10.0.0.1:2379", "[::1]:2379", "etcd-3:2379")
    assert load(options_class, *flags_of(options)) == options
    shown = repr(options) + " ".join(flags_of(options)) + repr(security_of(
        EtcdOptions(etcd=ETCD, etcd_user="worker", etcd_password_file=str(password_file))
    ))  # fmt: skip
    assert PASSWORD not in shown


def test_the_defaults_name_no_etcd():
    options = load(ProxyOptions)
    assert options.etcd == EtcdOptions()
    assert (options.etcd.etcd, options.etcd.etcd_prefix) == ((), "/neuron-di")
    assert (options.etcd.etcd_ttl_s, options.etcd.is_auto) == (10.0, False)
    assert load(ProxyOptions, "--etcd=auto").etcd.is_auto


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--etcd=auto,a:1"], "auto or a list"),
        (["--etcd=host"], "HOST:PORT"),
        (["--etcd=http://a:1"], "HOST:PORT"),
        (["--etcd=a:70000"], "HOST:PORT"),
        (["--etcd-prefix=neuron"], "--etcd-prefix"),
        (["--etcd-prefix=/a/"], "--etcd-prefix"),
        (["--etcd-prefix=/a\nb"], "--etcd-prefix"),
        (["--etcd-cert=c", "--etcd-ca=a"], "--etcd-key go together"),
        (["--etcd-cert=c", "--etcd-key=k"], "needs --etcd-ca"),
        (["--etcd-user=u"], "go together"),
        (["--etcd=auto", "--etcd-ca=a"], "loopback only"),
        (["--etcd-ca=a"], "are for etcd"),
        (["--etcd=", "--etcd-user=u", "--etcd-password-file=f"], "are for etcd"),
        (["--etcd-ttl-s=1"], "from 2"),
        (["--etcd-password=x"], "--etcd-password-file"),
    ],
)
def test_what_cannot_work_is_refused_by_name(flags, words):
    with pytest.raises(ConfigError, match=words):
        load(ProxyOptions, *flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--etcd=auto"], "auto is for"), (["--etcd=a:1", "--registry=tcp://a:1"], "one of them")],
)
def test_what_a_worker_cannot_be_told(flags, words):
    with pytest.raises(ConfigError, match=words):
        load(WorkerOptions, "m", "--role=both", *flags)


@pytest.mark.parametrize("text", [b"", b"\n", b"a\nb\n", b"x" * 5000, b"\xff\xfe"])
def test_a_file_that_holds_no_password(tmp_path, text):
    path = tmp_path / "password"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=str(path)):
        security_of(EtcdOptions(etcd=ETCD, etcd_user="u", etcd_password_file=str(path)))


def test_files_that_cannot_be_read(tmp_path):
    gone = str(tmp_path / "gone")
    with pytest.raises(ConfigError, match="gone"):
        security_of(EtcdOptions(etcd=ETCD, etcd_user="u", etcd_password_file=gone))
    with pytest.raises(ConfigError, match="gone"):
        security_of(EtcdOptions(etcd=ETCD, etcd_ca=gone))
    (tmp_path / "ca.der").write_bytes(b"\x30\x82")
    with pytest.raises(ConfigError, match="PEM"):
        security_of(EtcdOptions(etcd=ETCD, etcd_ca=str(tmp_path / "ca.der")))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the keys")
def test_certificates_that_cannot_serve_are_told_before_any_connection(tmp_path):
    ca, key, other, locked = (str(tmp_path / name) for name in ("ca", "key", "other", "locked"))
    new_key = "genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256"
    for command in (
        f"{new_key} -out {key}",
        f"{new_key} -out {other}",
        f"{new_key} -aes-128-cbc -pass pass:secret -out {locked}",
        f"req -x509 -key {key} -subj /CN=etcd -out {ca}",
    ):
        subprocess.run(["openssl", *command.split()], check=True, capture_output=True)
    options = EtcdOptions(etcd=ETCD, etcd_ca=ca, etcd_cert=ca, etcd_key=key)
    assert security_of(options).pem().key
    with pytest.raises(ConfigError, match=f"cannot use the certificate {key} for etcd"):
        security_of(EtcdOptions(etcd=ETCD, etcd_ca=key))
    for wrong in (other, locked, ca):
        with pytest.raises(ConfigError, match=f"certificate {ca} with the key {wrong} for etcd"):
            security_of(EtcdOptions(etcd=ETCD, etcd_ca=ca, etcd_cert=ca, etcd_key=wrong))


def test_a_password_is_read_anew_and_its_file_should_be_ours(password_file, caplog):
    options = EtcdOptions(
        etcd=("10.0.0.1:1",), etcd_user="u", etcd_password_file=str(password_file)
    )
    security = security_of(options)
    assert "etcd_password_in_the_clear" in caplog.text
    assert "others" not in caplog.text
    password_file.write_text("another")
    password_file.chmod(0o644)
    assert security.password() == "another"
    assert "etcd_password_readable_by_others" in caplog.text
    assert "another" not in repr(Security(user="u", password=lambda: "another"))


async def test_which_registry_is_opened():
    async with open_registry(None, EtcdOptions()) as registry:
        assert registry is None
    async with open_registry("tcp://127.0.0.1:1", EtcdOptions()) as registry:
        assert type(registry).__name__ == "RegistryClient"
    async with open_registry(None, EtcdOptions(etcd=("127.0.0.1:1",))) as registry:
        assert type(registry).__name__ == "EtcdRegistry"

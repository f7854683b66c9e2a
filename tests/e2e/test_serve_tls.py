"""`neuron-di serve` for others than this machine: TLS, and keys for whoever may ask."""

import asyncio
import shutil
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from openai_kit import Client
from process_kit import command, run, said

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the keys"),
]


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """One that this machine's addresses share, and that signs itself; its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", key]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(
        ["openssl", "req", "-x509", *new_key, "-days", "2", *names, "-out", str(cert)],
        check=True,
        capture_output=True,
    )
    return cert, key


@asynccontextmanager
async def client_of(url: str, cert: Path, key: str | None) -> AsyncIterator[Client]:
    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=cert))
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        yield Client(session, url, "tiny-llama")


async def test_serve_with_tls_and_keys(llama: Path, tmp_path: Path) -> None:
    cert, cert_key = make_certificate(tmp_path)
    keys = tmp_path / "keys.toml"
    alice = (await run("key", "create", str(keys), "alice")).stdout.strip()
    operator = (await run("key", "create", str(keys), "op", "--operator")).stdout.strip()
    arguments = [f"--tls-cert={cert}", f"--tls-key={cert_key}", f"--api-keys={keys}"]
    async with command("serve", str(llama), "--port=0", "--threads=1", *arguments) as serving:
        url = (await said(serving, r"serving tiny-llama at (https://\S+)/v1$"))[1]
        for key in (alice, operator):
            async with client_of(url, cert, key) as client:
                answer = await client.ask("def main(", max_tokens=4)
                assert answer.usage["completion_tokens"] == 4
        for wrong in (None, alice[:-1]):
            async with (
                client_of(url, cert, wrong) as client,
                client.post("def main(", max_tokens=4) as refused,
            ):
                assert refused.status == 401
                assert (await refused.json())["error"]["code"] == "invalid_api_key"

        trusting = {"SSL_CERT_FILE": str(cert), "COLUMNS": "200"}
        shown = await run("status", "--url", url, "--key", operator, environ=trusting)
        assert (shown.code, shown.stderr) == (0, "")
        assert f"proxy {url} " in shown.stdout
        assert "decode-0" in shown.stdout
        shown = await run("status", "--url", url, environ=trusting | {"KEY_NEURON_DI": operator})
        assert shown.code == 0
        for flags, environ, words in (
            ([], trusting, "wants an API key: set KEY_NEURON_DI, or give --key"),
            (["--key", "ndi-wrong"], trusting, "does not accept this API key"),
            (["--key", alice], trusting, "wants an operator's API key"),
            (["--key", operator], {"SSL_CERT_FILE": ""}, "SSL_CERT_FILE"),
        ):
            ended = await run("status", "--url", url, *flags, environ=environ)
            assert (ended.code, ended.stdout) == (1, "")
            assert words in ended.stderr
            assert len(ended.stderr.splitlines()) == 1

        serving.send_signal(signal.SIGTERM)
        _, stderr = await asyncio.wait_for(serving.communicate(), 60)
        assert serving.returncode == 0
        assert b"Traceback" not in stderr
        assert alice.encode() not in stderr
        assert operator.encode() not in stderr

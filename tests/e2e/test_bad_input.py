"""What is wrong is said: by a 4xx that names it, or by one line and exit code 2."""

import json
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai_kit import Client, Refused, gather
from process_kit import run, running_fleet

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

CHAT = [{"role": "user", "content": "hello"}]


# Requests.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "numbers"),
    [(4096, 1, ("4096",)), (5000, 1, ("5000", "4096")), (4000, 97, ("4000", "97", "4096"))],
)
async def test_prompt_longer_than_the_context(
    llama_1p1d: Client, num_prompt: int, max_tokens: int, numbers: tuple[str, ...], stream: bool
) -> None:
    with pytest.raises(Refused) as refused:
        await llama_1p1d.ask([5] * num_prompt, max_tokens=max_tokens, stream=stream)
    assert refused.value.status == 400
    assert all(number in refused.value.error["message"] for number in numbers)
    await llama_1p1d.until_idle()


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ("hello", {"temperatur": 1}, "temperatur"),
        ("hello", {"max_tokens": "9"}, "max_tokens"),
        ("hello", {"top_p": 0}, "top_p"),
        (CHAT, {"tools": [{}]}, "tools[0].type"),
        ([5, 99999], {}, "prompt"),
        ([5, -1], {}, "prompt"),
        ("", {}, "prompt"),
        ([5, 6.5], {}, "prompt"),
        ("hello", {"stop_token_ids": [2048]}, "stop_token_ids"),
        ([{"role": "user"}], {}, "messages"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "messages"),
    ],
)
async def test_wrong_field_is_named(
    llama_1p1d: Client, prompt: Any, params: dict[str, Any], param: str
) -> None:
    with pytest.raises(Refused) as refused:
        await llama_1p1d.ask(prompt, **params)
    assert refused.value.status == 400
    assert refused.value.error["param"] == param
    assert refused.value.error["type"] == "invalid_request_error"
    await llama_1p1d.until_idle()


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"model": "m", "prompt": "\xff"}', b"[" * 100_000],
    ids=["empty", "cut", "list", "null", "not-utf-8", "deep"],
)
async def test_bad_json(llama_1p1d: Client, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        async with llama_1p1d.session.post(
            llama_1p1d.url + path, data=body, headers={"Content-Type": "application/json"}
        ) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_unknown_model(llama_1p1d: Client) -> None:
    with pytest.raises(Refused) as refused:
        await llama_1p1d.ask("hello", model="tiny-lama")
    assert refused.value.status == 404
    assert "tiny-lama" in refused.value.error["message"]


# A pool that is too small for the context, or for all that is asked at once.


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def small_pool(llama: Path) -> AsyncIterator[Client]:
    async with running_fleet(llama, num_blocks=4) as client:
        yield client


async def test_too_few_blocks_for_one_request(small_pool: Client) -> None:
    with pytest.raises(Refused) as refused:
        await small_pool.ask([5] * 60, max_tokens=5)
    assert refused.value.status == 400
    assert all(number in refused.value.error["message"] for number in ("60", "64"))
    answer = await small_pool.ask([5] * 60, max_tokens=4, ignore_eos=True)
    assert answer.usage["total_tokens"] == 64


async def test_too_few_blocks_for_all_at_once_means_waiting(small_pool: Client) -> None:
    asks = (
        small_pool.ask([5 + index] * 33, max_tokens=9, ignore_eos=True, stream=index % 2 == 0)
        for index in range(16)
    )
    assert {answer.usage["total_tokens"] for answer in await gather(*asks)} == {42}
    await small_pool.until_idle()


# Commands that cannot start: code 2, one line, no process left. Of two workers that refuse, as of
# damaged weights, one speaks; elsewhere there is one, which takes half of the time.


async def _refusal(
    *arguments: str, name: str = "serve", environ: dict[str, str] | None = None
) -> str:
    ended = await run(name, "--port=0", "--log-level=error", *arguments, environ=environ)
    lines = ended.stderr.splitlines()
    assert ended.code == 2, ended.stderr
    assert len(lines) == 1, ended.stderr
    assert lines[0].startswith("neuron-di: ")
    assert ended.stdout == ""
    return lines[0]


def _broken(folder: Path, llama: Path) -> Path:
    shutil.copytree(llama, folder)
    return folder


async def test_missing_model_folder(tmp_path: Path) -> None:
    folder = str(tmp_path / "nowhere")
    assert f"{folder} does not exist" in await _refusal(folder)


async def test_damaged_weights(tmp_path: Path, llama: Path) -> None:
    folder = _broken(tmp_path / "m", llama)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    refusal = await _refusal(str(folder))
    assert str(weights) in refusal
    assert "damaged" in refusal


async def test_unsupported_architecture(tmp_path: Path, llama: Path) -> None:
    folder = _broken(tmp_path / "m", llama)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "MambaForCausalLM" in await _refusal(str(folder), "--combined")


async def test_not_enough_memory_for_the_pool(llama: Path) -> None:
    refusal = await _refusal(str(llama), "--combined", "--num-blocks=100000000")
    assert "not enough memory" in refusal
    assert "100000000 blocks 2" in refusal, "what the pool would take"
    assert "blocks fit" in refusal, "what would do"


async def test_more_context_than_the_model_has(llama: Path) -> None:
    refusal = await _refusal(str(llama), "--combined", "--context-tokens=5000")
    assert "--context-tokens 5000 is more than the model's 4096" in refusal


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--api-keys={none}"], "cannot read the key file {none}"),
        (["--tls-cert={none}", "--tls-key={none}"], "cannot use the certificate {none}"),
        (["--otlp-endpoint=nonsense"], "the OTLP endpoint must be an address"),
    ],
    ids=["keys", "tls", "otlp"],
)
async def test_what_the_proxy_cannot_serve_with(
    tmp_path: Path, llama: Path, flags: list[str], named: str, processes: str
) -> None:
    none = str(tmp_path / "none.pem")
    filled = [flag.format(none=none) for flag in (*flags, f"--processes={processes}")]
    for name, arguments in (("serve", [str(llama)]), ("proxy", [])):
        refusal = await _refusal(*arguments, *filled, name=name)
        assert named.format(none=none) in refusal


async def test_a_file_whose_name_is_no_text(llama: Path) -> None:
    name = b"k\xe8ys.toml".decode(errors="surrogateescape")  # as a Latin-1 terminal gives it
    assert "cannot read the key file k" in await _refusal(str(llama), f"--api-keys={name}")


async def test_port_in_use(llama: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, arguments in (("serve", [str(llama)]), ("proxy", [])):
            refusal = await _refusal(*arguments, f"--port={port}", name=name)
            assert f"cannot listen on 127.0.0.1:{port}" in refusal


@pytest.mark.parametrize("flag", ["--port", "--signal-port"])
async def test_port_of_a_worker_in_use(llama: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = (str(llama), "--role=prefill", f"{flag}={port}")
        refusal = await _refusal(*arguments, name="worker")
        assert f"127.0.0.1:{port}" in refusal


@pytest.mark.parametrize(
    ("arguments", "environ", "named", "near"),
    [
        (["--decod-batch=3"], {}, "--decod-batch", "--decode-batch"),
        ([], {"NEURON_DI_PREFIL": "2"}, "NEURON_DI_PREFIL", "NEURON_DI_PREFILL"),
        (["--config={toml}"], {}, "'chunk_token'", "'chunk_tokens'"),
    ],
    ids=["flag", "variable", "file"],
)
async def test_unknown_key(
    tmp_path: Path,
    llama: Path,
    arguments: list[str],
    environ: dict[str, str],
    named: str,
    near: str,
) -> None:
    toml = tmp_path / "site.toml"
    toml.write_text("chunk_token = 32\n")
    filled = [argument.format(toml=toml) for argument in arguments]
    refusal = await _refusal(str(llama), *filled, environ=environ)
    assert f"unknown {refusal.split('unknown ')[1].split()[0]} {named}" in refusal
    assert f"nearest valid one is {near}" in refusal

"""Offline disaggregated inference: a prefill and a decode process, a list of prompts, no proxy.

    python examples/offline_di.py [MODEL]

The prefill process computes each prompt's KV and first token; the decode process pulls the
KV out of the prefill process's memory and generates the rest. Both are told about each
prompt at the same time, as the proxy does it for a server; and where the first token is the whole
answer, the decode process is told to wait no longer.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import sys
from collections.abc import Callable, Coroutine, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from neuron_di.config import WorkerOptions
from neuron_di.errors import NeuronDiError
from neuron_di.types import RequestId
from neuron_di.wire import (
    DecodeLeg,
    Finished,
    PeerAddress,
    PrefillLeg,
    Released,
    SamplingParams,
    Token,
)
from neuron_di.worker import Worker, load_model

MODEL = Path(__file__).parent / "models" / "tiny-tales"
PROMPTS = (
    "Once upon a time there was a small fox",
    "Once upon a time there was an old sailor",
    "Once upon a time, in a quiet village,",
    "One rainy morning a girl named",
)
SAMPLING = SamplingParams(temperature=0.0, max_tokens=80)
PEER_TIMEOUT_S = 60.0
WORK_TIMEOUT_S = 3600.0  # a large model is loaded first, and all prompts answered


def prefill_process(
    model: str, prompts: Sequence[str], decode: Connection, out: Connection
) -> None:
    """Print to `out` what this process generated: token 0 of each prompt."""

    async def run() -> None:
        options = WorkerOptions(model=model, role="prefill", worker_id="prefill")
        worker = Worker(options, load_model(model, None, "prefill", options.engine))
        decode.send_bytes(msgspec.msgpack.encode(worker.record().peer_address()))
        texts = await asyncio.gather(
            *(prefill(worker, i, prompt) for i, prompt in enumerate(prompts))
        )
        await worker.close()
        out.send_bytes(msgspec.msgpack.encode(texts))

    async def prefill(worker: Worker, index: int, prompt: str) -> str:
        assert worker.prefill is not None
        leg = PrefillLeg(
            request_id=RequestId(f"prompt-{index}"),
            attempt=0,
            endpoint="completions",
            prompt=msgspec.Raw(msgspec.json.encode(prompt)),
            sampling=SAMPLING,
            timeout_s=PEER_TIMEOUT_S,
        )
        text = ""
        async for event in worker.prefill.run(leg):
            if isinstance(event, Token | Finished):
                text += event.text
            if isinstance(event, Finished):
                decode.send_bytes(msgspec.msgpack.encode(index))
                say(f"prefill {index}: {event.num_prompt} tokens, the first token ended the answer")
            elif isinstance(event, Released):
                receipt = event.receipt
                say(
                    f"prefill {index}: {receipt.num_prompt} tokens in "
                    f"{receipt.prefill_s * 1000:.1f} ms, handed over {receipt.kv_bytes:,} bytes"
                )
        return text

    carry_out("prefill", run)


def decode_process(model: str, num_prompts: int, prefill: Connection, out: Connection) -> None:
    """Print to `out` what this process generated: all tokens after the first."""

    async def run() -> None:
        options = WorkerOptions(model=model, role="decode", worker_id="decode")
        worker = Worker(options, load_model(model, None, "decode", options.engine))
        peer = msgspec.msgpack.decode(received(prefill), type=PeerAddress)
        legs = [asyncio.create_task(decode(worker, i, peer)) for i in range(num_prompts)]
        loop = asyncio.get_running_loop()

        def hear() -> None:
            try:
                legs[msgspec.msgpack.decode(prefill.recv_bytes(), type=int)].cancel()
            except EOFError:  # the prefill process has said all
                loop.remove_reader(prefill.fileno())

        loop.add_reader(prefill.fileno(), hear)
        texts = await asyncio.gather(*legs)
        loop.remove_reader(prefill.fileno())
        await worker.close()
        out.send_bytes(msgspec.msgpack.encode(texts))

    async def decode(worker: Worker, index: int, peer: PeerAddress) -> str:
        assert worker.decode is not None
        leg = DecodeLeg(
            request_id=RequestId(f"prompt-{index}"),
            attempt=0,
            sampling=SAMPLING,
            prefill=peer,
            timeout_s=PEER_TIMEOUT_S,
        )
        text = ""
        with contextlib.suppress(asyncio.CancelledError):  # nothing is left to be generated
            async for event in worker.decode.run(leg):
                if isinstance(event, Token | Finished):
                    text += event.text
                if isinstance(event, Finished):
                    receipt = event.receipt
                    say(
                        f"decode  {index}: pulled {receipt.kv_bytes:,} bytes by {receipt.link}, "
                        f"{event.num_generated - 1} tokens in {receipt.decode_s * 1000:.1f} ms"
                    )
        return text

    carry_out("decode", run)


def carry_out(name: str, run: Callable[[], Coroutine[None, None, None]]) -> None:
    try:
        asyncio.run(run())
    except NeuronDiError as error:
        sys.exit(f"{name}: {error.message}")


def received(connection: Connection) -> bytes:
    """The next message of the other process; it must come in time."""
    if not connection.poll(WORK_TIMEOUT_S):
        sys.exit("the other process said nothing in time")
    try:
        return connection.recv_bytes()
    except EOFError:
        sys.exit("the other process ended before it had said anything")


def say(line: str) -> None:
    print(line, flush=True)


def main(model: str, prompts: Sequence[str]) -> None:
    context = multiprocessing.get_context("spawn")
    address_in, address_out = context.Pipe(duplex=False)
    outputs = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(
            target=prefill_process, args=(model, prompts, address_out, outputs[0][1]), daemon=True
        ),
        context.Process(
            target=decode_process,
            args=(model, len(prompts), address_in, outputs[1][1]),
            daemon=True,
        ),
    ]
    for process in processes:
        process.start()
    # Theirs alone now: so whoever waits for one that has ended waits no longer.
    for connection in (address_in, address_out, outputs[0][1], outputs[1][1]):
        connection.close()
    first, rest = (msgspec.msgpack.decode(received(out), type=list[str]) for out, _ in outputs)
    for process in processes:
        process.join(PEER_TIMEOUT_S)
    for prompt, first_text, rest_text in zip(prompts, first, rest, strict=True):
        say(f"\nprompt  {prompt}\nprefill {first_text!r}\ndecode  {rest_text!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=str(MODEL), help="model folder or hub id")
    parser.add_argument("--prompt", action="append", help="may be given several times")
    arguments = parser.parse_args()
    main(arguments.model, arguments.prompt or PROMPTS)

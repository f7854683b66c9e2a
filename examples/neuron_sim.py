"""The demo behind `make demo-neuron`: the Neuron path on a machine without Neuron.

A libnrt in C stands for the runtime and its NeuronCores, and packages of our own for NxD Inference
(both in tests/). With them: compile the shipped model, serve it by one prefill and one decode
worker on two simulated cores each, chat once, and print how the KV moved.
"""

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import demo
from rich.console import Console

from neuron_di.config import (
    CompileOptions,
    EngineOptions,
    LogOptions,
    NeuronOptions,
    ServeOptions,
    flags_of,
)
from neuron_di.errors import NeuronDiError
from neuron_di.serve import Fleet

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
STAND_IN = TESTS / "neuron_stand_in"
COMPILE_TIMEOUT_S = 300.0
# float32, as on a CPU: so the story is the one of `make demo`.
ENGINE = EngineOptions(
    device="neuron",
    dtype="float32",
    context_tokens=384,
    decode_batch=2,
    tp=2,
    neuron=NeuronOptions(neuron_artifacts=str(ROOT / "build" / "neuron_artifacts")),
)


def simulated_host(folder: str) -> dict[str, str]:
    """What a process must find in its environment to take this machine for a trn1.32xlarge.

    `folder` stands for what the processes of that host share.
    """
    sys.path.insert(0, str(TESTS))
    from nrt_sim.build import CannotBuild, library_path

    try:
        library = library_path()
    except CannotBuild as error:
        sys.exit(f"demo: the simulator of libnrt is built by a C compiler, and {error}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    before = os.environ.get("PYTHONPATH")
    return {
        "NEURON_DI_LIBNRT": str(library),
        "NRT_SIM_INSTANCE": "trn1.32xlarge",
        "NRT_SIM_ROOT": folder,
        "NEURON_RT_ASYNC_SENDRECV_BOOTSTRAP_PORT": str(port),
        "PYTHONPATH": f"{STAND_IN}{os.pathsep}{before}" if before else str(STAND_IN),
    }


def compile_model(model: Path) -> None:
    """For the shape that is served. Says what it does; exits with its code when it cannot."""
    options = CompileOptions(
        model=str(model),
        dtype=ENGINE.dtype,
        context_tokens=ENGINE.context_tokens,
        decode_batch=ENGINE.decode_batch,
        tp=ENGINE.tp,
        neuron=ENGINE.neuron,
        log=LogOptions(log_level="warning"),
    )
    ended = subprocess.run(
        [sys.executable, "-m", "neuron_di", "compile", *flags_of(options)],
        stdout=subprocess.DEVNULL,
        timeout=COMPILE_TIMEOUT_S,
        check=False,
    )
    if ended.returncode != 0:
        sys.exit(ended.returncode)


async def main(question: str, model: Path) -> int:
    console = Console(highlight=False)
    console.print("[dim]no Neuron hardware here: a simulator of libnrt, a stand-in for NxDI[/dim]")
    options = ServeOptions(
        model=str(model), port=0, engine=ENGINE, log=LogOptions(log_level="warning")
    )
    async with Fleet(options) as fleet:
        names = ", ".join(f"{name} (pid {pid})" for name, pid in fleet.pids().items())
        console.print(f"[dim]{names} at {fleet.url}[/dim]\n", soft_wrap=True)
        console.print(f"[bold]you[/bold]    {question}\n[bold]model[/bold]  ", end="")
        async with asyncio.timeout(demo.ANSWER_TIMEOUT_S):
            answer_id = await demo.chat(console, fleet, question)
            receipt = await demo.fetch_receipt(fleet, answer_id)
    demo.print_receipt(console, receipt)
    console.print(f" the engine {receipt['link']} ({receipt['link_reason']})", markup=False)
    return 0 if receipt["link"] == "nrt" else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--question", default=demo.QUESTION)
    parser.add_argument("--model", type=Path, default=demo.MODEL)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nrt-") as shared:
        os.environ.update(simulated_host(shared))
        compile_model(arguments.model)
        try:
            sys.exit(asyncio.run(main(arguments.question, arguments.model)))
        except NeuronDiError as error:
            sys.exit(f"demo: {error.message}")

"""Points 4 to 8 of the first hour: a model's KV, NIXL, and bytes between two cores."""

import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neuron_di.config import DoctorOptions
from neuron_di.doctor.finding import Grade
from neuron_di.doctor.first_hour_point import Point, skipped
from neuron_di.doctor.machine import Machine
from neuron_di.doctor.neuron_asked import Asked, ask, ask_core, core_environment
from neuron_di.doctor.pci import efa_adapters
from neuron_di.errors import ConfigError
from neuron_di.neuron_cores import allowed_cores, as_text

PAIR_TIMEOUT_S = 300.0
MODEL_TIMEOUT_S = 1800.0
NIXL_TIMEOUT_S = 120.0
CONNECT_TIMEOUT_S = 60.0
WATCH_S = 10.0  # requests of a dead peer
ARTIFACTS_VARIABLE = "NEURON_DI_NEURON_ARTIFACTS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What the points try something on: two free cores, and variables that they need."""

    machine: Machine
    options: DoctorOptions
    total: int  # cores of this host
    cores: tuple[int, int]
    variables: Mapping[str, str] = field(default_factory=dict)

    def ask(self, module: str, *words: str, cores: range, timeout_s: float) -> Asked:
        """Run a module on these cores."""
        return ask(
            self.machine,
            self.options,
            *words,
            module=module,
            environment=core_environment(self.machine, cores, self.variables),
            timeout_s=timeout_s,
        )


def pair(bench: Bench) -> tuple[Point, Point]:
    """Points 7 and 8: bytes between two cores, flush, and the end of a peer."""
    received, is_own_address = _run_pair(bench, "receive")
    if (failed := _unconnected(received)) is not None:
        why = f"The two cores do not connect: {failed}."
        facts = {"steps": received.steps.found}
        return Point(7, Grade.FAILED, why, facts), Point(8, Grade.FAILED, why, facts)
    return (
        _peer_killed(bench, received),
        _flush(received, is_own_address=is_own_address),
    )


def _run_pair(bench: Bench, role: str) -> tuple[Asked, bool]:
    """(what came of it, whether it took this host's own address to connect)."""
    own, peer = bench.cores
    words = (str(own), str(peer), str(CONNECT_TIMEOUT_S), str(WATCH_S))
    cores = range(own, own + 1)
    asked = bench.ask(
        "nrt_pair", role, bench.options.host, *words, cores=cores, timeout_s=PAIR_TIMEOUT_S
    )
    address = own_address()
    if _unconnected(asked) is None or address is None:
        return asked, False
    again = bench.ask("nrt_pair", role, address, *words, cores=cores, timeout_s=PAIR_TIMEOUT_S)
    return (asked, False) if _unconnected(again) is not None else (again, True)


def _unconnected(asked: Asked) -> str | None:
    for step in ("start", "connect"):
        if (failed := asked.failure_in_full(step)) is not None:
            return failed
        if step not in asked.steps.found:
            return asked.words or f"no answer, code {asked.returncode}"
    return None


def own_address() -> str | None:
    """This host's address towards others. Nothing is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect(("192.0.2.1", 9))  # an address for documents, of nobody
        return str(asking.getsockname()[0])
    return None


def _flush(asked: Asked, *, is_own_address: bool) -> Point:
    found, moved = asked.steps.of("flush"), asked.steps.of("bytes")
    facts: dict[str, Any] = {"flush": found, "bytes": moved, "own_address": is_own_address}
    for step in ("bytes", "flush"):
        if not asked.did(step):
            failed = asked.failure_in_full(step) or "not tried"
            answer = f"Bytes do not arrive as they were sent: {failed}."
            return Point(8, Grade.FAILED, answer, facts)
    early, rounds = found["there_before_flush"], found["rounds"]
    part = found["partly_there_before_flush"]
    need = "a flush is necessary" if early < rounds else "here a flush made no difference"
    answer = (
        f"Of {rounds} messages {early} were there before the flush and {part} in part, and all "
        f"after it: {need}."
    )
    return Point(8, Grade.OK, answer, facts)


def _peer_killed(bench: Bench, received: Asked) -> Point:
    sent, _ = _run_pair(bench, "send")
    sides = {"receives": received, "sends": sent}
    facts: dict[str, Any] = {
        name: {"kill": asked.steps.of("kill"), "leave": asked.steps.of("leave")}
        for name, asked in sides.items()
    }
    facts["cores_after"] = after = {
        str(lnc): _had_again(ask_core(bench.machine, bench.options, lnc, bench.variables))
        for lnc in bench.cores
    }
    words = []
    for name, asked in sides.items():
        if (outcomes := asked.steps.of("kill").get("outcomes")) is None:
            failed = asked.failure_in_full("kill") or _unconnected(asked) or "no answer"
            return Point(7, Grade.FAILED, f"With posted {name}: {failed}.", facts)
        left = sum(outcome == "still posted" for outcome in outcomes)
        words.append(f"{left} of {len(outcomes)} {name}")
    still = f"After {WATCH_S:g} s {' and '.join(words)} are still posted"
    lost = [f"core {lnc}: {said}" for lnc, said in after.items() if said != "ok"]
    if lost:
        return Point(7, Grade.FAILED, f"{still}; later {'; '.join(lost)}.", facts)
    return Point(7, Grade.OK, f"{still}; new processes have both cores again.", facts)


def _had_again(asked: Asked) -> str:
    for step in ("runtime", "memory", "send_receive"):
        if (failed := asked.failure_in_full(step)) is not None:
            return f"{step}: {failed}"
    return "ok" if "memory" in asked.steps.found else asked.words or "no answer"


def nixl(bench: Bench) -> Point:
    """Point 5. libfabric's shared memory is switched off, which knows no device memory."""
    if not efa_adapters(bench.machine):
        return skipped(5, "There is no EFA adapter, and NIXL reaches Neuron memory by EFA only.")
    own, peer = bench.cores
    words = ("LIBFABRIC", "device", str(own), str(peer))
    cores = range(own, own + 1)
    asked = bench.ask("first_hour_nixl", *words, cores=cores, timeout_s=NIXL_TIMEOUT_S)
    facts = {"steps": asked.steps.found}
    if (failed := asked.failure("nixl")) is not None:
        return skipped(5, f"NIXL cannot be loaded: {failed}.")
    for step in ("memory", "register", "read"):
        if (failed := asked.failure_in_full(step)) is not None:
            return Point(5, Grade.FAILED, f"It fails at the step {step}: {failed}.", facts)
    if not asked.did("read"):
        return Point(5, Grade.FAILED, f"It ended early: {asked.why_not('read')}.", facts)
    read = asked.steps.of("read")
    when = "at once" if read["there_at_once"] else "only a moment after the read was over"
    return Point(5, Grade.OK, f"It read {read['num_bytes']} bytes; they were there {when}.", facts)


def model(bench: Bench) -> tuple[Point, Point]:
    """Points 4 and 6, with a model that was compiled, on other cores than the free ones."""
    chosen = _artifact(bench)
    if isinstance(chosen, str):
        return skipped(4, chosen), skipped(6, chosen)
    folder, cores = chosen
    words = (str(folder), str(cores[0]), bench.options.host, str(bench.cores[0]))
    asked = bench.ask("first_hour_model", *words, cores=cores, timeout_s=MODEL_TIMEOUT_S)
    if not asked.did("load"):
        if asked.is_taken:
            why = f"Other processes have some of the NeuronCores {as_text(cores)}."
            return skipped(4, why), skipped(6, why)
        why = f"The model does not load onto cores {as_text(cores)}: {asked.why_not('load')}."
        return Point(4, Grade.FAILED, why), skipped(6, why)
    return _addresses(asked), _beside(asked)


def _artifact(bench: Bench) -> tuple[Path, range] | str:
    """The compiled model that needs the fewest cores, and neighbouring ones for it; or why none."""
    from neuron_di.backends.neuron_artifact import (
        MANIFEST,
        artifacts_root,
        is_artifact,
        missing_files,
        read_manifest,
    )

    environment = bench.machine.environment
    root = artifacts_root(environment.get(ARTIFACTS_VARIABLE), environment)
    folders = [root] if is_artifact(root) else [path.parent for path in root.glob(f"*/{MANIFEST}")]
    usable: list[tuple[int, int, Path]] = []
    for folder in folders:
        with suppress(ConfigError):
            settings = read_manifest(folder).settings
            if not missing_files(folder, settings.tp):
                usable.append((settings.tp, settings.context_tokens, folder))
    if not usable:
        return (
            "There is no compiled model: neuron-di compile MODEL makes one, and "
            f"{ARTIFACTS_VARIABLE} names its folder if it is not in the user's cache."
        )
    num_cores, _, folder = min(usable)
    allowed = allowed_cores(environment, bench.total)
    free = [lnc for lnc in allowed if lnc not in bench.cores]
    for first in reversed(free):
        cores = range(first, first + num_cores)
        if first % num_cores == 0 and set(cores) <= set(free):  # as `serve` places a worker
            return folder, cores
    return f"The smallest compiled model needs {num_cores} cores, from a multiple of that on."


def _addresses(asked: Asked) -> Point:
    found, loaded = asked.steps.of("addresses"), asked.steps.of("load")
    facts: dict[str, Any] = {"model": loaded, **found}
    if not asked.did("addresses"):
        return Point(4, Grade.FAILED, f"It cannot be told: {asked.why_not('addresses')}.", facts)
    ranks: list[Mapping[str, Any]] = found["ranks"]
    known = [rank for rank in ranks if rank.get("efa") and rank.get("dmabuf") == "ok"]
    handles = sum(bool(rank["has_handle"]) for rank in ranks)
    answer = f"The runtime names an EFA adapter, and gives a dma-buf, for {len(known)} of "
    answer += f"{len(ranks)} ranks' KV; {handles} show the runtime's own handle."
    return Point(4, Grade.OK if len(known) == len(ranks) else Grade.NOTE, answer, facts)


def _beside(asked: Asked) -> Point:
    alone, beside = asked.steps.of("decode"), asked.steps.of("decode_beside")
    facts = {"alone": alone, "beside_a_transfer": beside}
    for step in ("decode", "connect", "decode_beside"):
        if asked.did(step):
            continue
        if step == "connect":  # why, is told by question 2 or 7
            failed = f"a median step is {alone['median_ms']} ms alone, and nothing goes beside"
            return Point(6, Grade.SKIPPED, f"There is no transfer: {failed} it.", facts)
        why = f"It cannot be measured: {asked.why_not(step)}."
        return Point(6, Grade.FAILED, why, facts)
    answer = (
        f"Median step {alone['median_ms']} ms alone, {beside['median_ms']} ms beside a transfer "
        f"of {beside['bytes_per_s'] / 1e6:.0f} MB/s, out of the same core."
    )
    return Point(6, Grade.OK, answer, facts)

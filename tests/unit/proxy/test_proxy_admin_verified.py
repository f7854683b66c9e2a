"""What a proxy makes of a worker that it gave an order, when answers fail: on a virtual clock."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Self

import msgspec
import pytest
from scripted_worker import make_record
from virtual_time import virtual

from neuron_di.clock import now_s
from neuron_di.errors import NeuronDiError, PeerGone, PeerTimeout
from neuron_di.types import Incarnation
from neuron_di.wire.admin import RoleOutcome, RoleTicket
from neuron_di_proxy import admin as admin_module
from neuron_di_proxy.admin import Admin
from neuron_di_proxy.admin_rules import LastWorker

BEFORE = make_record("w", "decode", 1, model="m")
AFTER = msgspec.structs.replace(BEFORE, role="both", incarnation=Incarnation("after"))
OTHER = make_record("o", "decode", 2, model="m")
TICKET = RoleTicket(ticket="t", before="decode", role="both", expires_s=30.0)
CHANGED = RoleOutcome(ticket="t", before="decode", role="both", state="changed")

Answer = RoleOutcome | NeuronDiError | None


class Scene:
    """An Admin, who is in its directory, and what worker processes answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, lease_s: float = 10.0) -> None:
        self.known = [BEFORE]
        self.status: Callable[[], object] = lambda: PeerTimeout("nobody answers")
        self.outcomes: list[Answer] = [CHANGED]  # the last one again and again
        self.num_asked = 0
        self.trouble = ""  # of the registry
        scene = self

        class Link:
            def __init__(self, _: object) -> None:
                pass

            async def __aenter__(self) -> Self:
                return self

            async def __aexit__(self, *_: object) -> None:
                pass

            async def outcome(self) -> RoleOutcome | None:
                scene.num_asked += 1
                answer = scene.outcomes[0]
                if len(scene.outcomes) > 1:
                    del scene.outcomes[0]
                if isinstance(answer, NeuronDiError):
                    raise answer
                return answer

        monkeypatch.setattr(admin_module, "AdminLink", Link)
        directory = SimpleNamespace(workers=lambda: tuple(self.known))
        health = SimpleNamespace(
            reports=lambda: [SimpleNamespace(record=each, state="up") for each in self.known],
            is_usable=lambda _: True,
            candid_directory=lambda: SimpleNamespace(trouble=lambda: self.trouble),
        )
        workers = SimpleNamespace(status=self._status)
        self.admin = Admin(directory, workers, health, None, lease_s=lease_s)  # type: ignore[arg-type]

    async def _status(self, record: object, timeout_s: float = 1.0) -> object:
        answer = self.status()
        await asyncio.sleep(timeout_s if isinstance(answer, PeerTimeout) else 0.0)
        if isinstance(answer, NeuronDiError):
            raise answer
        return answer

    async def verified(self) -> list[str]:
        lines = self.admin._verified(BEFORE, TICKET, None)
        return [f"{line.phase}: {line.words}" async for line in lines]

    async def gone(self, *, is_ending: bool) -> list[str]:
        lines = self.admin._gone(BEFORE, is_ending=is_ending)
        return [f"{line.phase}: {line.words}" async for line in lines]


@virtual
async def test_one_refused_connection_is_not_the_end_of_a_process(monkeypatch) -> None:
    scene = Scene(monkeypatch)
    refusals = [PeerGone("refused"), PeerTimeout("waits"), PeerGone("refused")]

    def status() -> object:
        if refusals:
            return refusals.pop(0)
        scene.known = [AFTER]
        return PeerTimeout("waits")

    scene.status = status
    assert (await scene.verified())[-1].startswith("done: it did switch: decode -> both")

    scene = Scene(monkeypatch)
    scene.status = lambda: PeerGone("refused")
    assert await scene.verified() == ["failed: the process of worker w has ended: its log says why"]


@virtual
async def test_a_question_that_failed_is_asked_again(monkeypatch) -> None:
    scene = Scene(monkeypatch)
    scene.known = [AFTER]
    scene.outcomes = [PeerTimeout("busy"), PeerGone("broke off"), CHANGED]
    assert (await scene.verified())[-1].startswith("done: it did switch")
    assert scene.num_asked == 3


@virtual
async def test_an_outcome_that_nobody_tells_is_no_other_order(monkeypatch) -> None:
    scene = Scene(monkeypatch)
    scene.known = [AFTER]
    scene.outcomes = [PeerTimeout("busy")]
    lines = await scene.verified()
    assert 120.0 <= now_s() <= 125.0
    assert lines[-1] == ("failed: it is back as a both worker, but its outcome is not known: busy")
    assert len(lines) > 50, "and who listens hears that we live"


@virtual
async def test_why_it_did_not_switch_is_said(monkeypatch) -> None:
    for outcome, why in (
        (None, "its process has restarted since"),
        (msgspec.structs.replace(CHANGED, ticket="u"), "another order came"),
        (msgspec.structs.replace(CHANGED, state="reverted", reason="no memory"), "no memory"),
    ):
        scene = Scene(monkeypatch)
        scene.known = [msgspec.structs.replace(AFTER, role="decode")]
        scene.outcomes = [outcome]
        assert await scene.verified() == [
            f"failed: it did not switch: it is back as a decode worker ({why})"
        ]


@virtual
async def test_without_a_registry_the_changed_worker_itself_tells_that_the_old_one_left(
    monkeypatch,
) -> None:
    scene = Scene(monkeypatch)
    scene.status = lambda: SimpleNamespace(record=AFTER if now_s() >= 5.0 else BEFORE)
    lines = await scene.gone(is_ending=False)
    assert lines[-1] == "left: another incarnation answers; the registry does not say so yet"
    assert 5.0 <= now_s() < 7.0


@virtual
async def test_without_a_registry_a_process_that_ended_is_gone(monkeypatch) -> None:
    scene = Scene(monkeypatch)
    scene.trouble = "etcd did not answer in time"
    scene.status = lambda: PeerGone("refused") if now_s() >= 5.0 else SimpleNamespace(record=BEFORE)
    assert (await scene.gone(is_ending=True))[-2:] == [
        "left: the registry is not heard: its key there ends with its lease",
        "ended: its process answers no more",
    ]
    assert 5.0 <= now_s() < 7.0


@pytest.mark.parametrize(("lease_s", "waits_s"), [(2.0, 20.0), (10.0, 20.0), (60.0, 120.0)])
@virtual
async def test_a_key_that_cannot_be_revoked_is_waited_for(monkeypatch, lease_s, waits_s) -> None:
    for is_ending in (False, True):
        begun_s = now_s()
        scene = Scene(monkeypatch, lease_s=lease_s)
        lines = await scene.gone(is_ending=is_ending)
        assert lines[-1] == f"failed: worker w is still in the registry after {waits_s:g} s"
        assert waits_s <= now_s() - begun_s < waits_s + 5.0


@virtual
async def test_a_ticket_that_cannot_be_given_back_hides_no_reason(monkeypatch) -> None:
    scene = Scene(monkeypatch)
    scene.known = [BEFORE, OTHER]
    aborted = []

    async def abort(ticket: str) -> None:
        aborted.append(ticket)
        raise PeerGone("it is gone")

    def check(_: object) -> None:
        raise LastWorker("nobody else", param="worker")

    link = SimpleNamespace(abort=abort)
    with pytest.raises(LastWorker, match="nobody else"):
        await scene.admin._check_again(link, BEFORE, "t", check)  # type: ignore[arg-type]
    assert aborted == ["t"]

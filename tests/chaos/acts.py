"""What can be done to processes, connections and clients at a phase, and undone afterwards."""

import asyncio

from .client import Manners
from .cluster import Place, Role
from .fault import Act, Scene
from .fault_proxy import Direction


def _victim(scene: Scene, role: Role) -> Place:
    return scene.prefill if role == "prefill" else scene.decode


def kill(*roles: Role) -> Act:
    async def act(scene: Scene) -> None:
        for role in roles:
            await _victim(scene, role).process.kill()
        scene.let_go()

    return act


def kill_and_restart(role: Role) -> Act:
    async def act(scene: Scene) -> None:
        place = _victim(scene, role)
        await place.process.kill()
        scene.let_go()
        await scene.cluster.restart(place.name)

    return act


def freeze(role: Role) -> Act:
    async def act(scene: Scene) -> None:
        _victim(scene, role).process.stop()
        scene.let_go()  # if it is the frozen one itself, it goes on when it is thawed

    return act


def thaw(role: Role) -> Act:
    async def act(scene: Scene) -> None:
        _victim(scene, role).process.cont()

    return act


def terminate(role: Role) -> Act:
    async def act(scene: Scene) -> None:
        _victim(scene, role).process.terminate()
        scene.let_go()

    return act


def end_of(role: Role) -> Act:
    async def act(scene: Scene) -> None:
        await _victim(scene, role).process.gone()

    return act


def freeze_for(role: Role, duration_s: float) -> Act:
    async def act(scene: Scene) -> None:
        await freeze(role)(scene)
        await asyncio.sleep(duration_s)
        await thaw(role)(scene)

    return act


async def kill_everybody(scene: Scene) -> None:
    for place in scene.cluster.places.values():
        await place.process.kill()
    scene.let_go()


async def kill_proxy(scene: Scene) -> None:
    await scene.cluster.proxy.kill()
    scene.let_go()


async def terminate_proxy(scene: Scene) -> None:
    scene.cluster.proxy.terminate()
    scene.let_go()


async def restart_proxy(scene: Scene) -> None:
    await scene.cluster.proxy.gone()
    await scene.cluster.restart_proxy()


def freeze_proxy_for(duration_s: float) -> Act:
    async def act(scene: Scene) -> None:
        scene.cluster.proxy.stop()
        scene.let_go()
        await asyncio.sleep(duration_s)
        scene.cluster.proxy.cont()

    return act


def block_signals(*directions: Direction) -> Act:
    """Up is from decode to prefill. Without a direction, both are blocked."""

    async def act(scene: Scene) -> None:
        scene.prefill.signals.block(*directions)
        scene.let_go()

    return act


def block_legs(role: Role) -> Act:
    async def act(scene: Scene) -> None:
        _victim(scene, role).legs.block()
        scene.let_go()

    return act


def garble_legs(role: Role) -> Act:
    """What the worker says is not what arrives, until it is healed."""

    async def act(scene: Scene) -> None:
        _victim(scene, role).legs.is_garbling = True
        scene.let_go()

    return act


async def reset_all(scene: Scene) -> None:
    for place in (scene.prefill, scene.decode):
        place.signals.reset()
        place.legs.reset()
    scene.let_go()


async def heal(scene: Scene) -> None:
    scene.cluster.calm()


async def clients_leave(scene: Scene) -> None:
    scene.leave.set()
    await asyncio.wait(scene.streams)  # their connections are closed before anything goes on
    scene.let_go()


async def clients_pause(scene: Scene) -> None:
    scene.read_on.clear()
    scene.let_go()
    await asyncio.sleep(1.0)
    scene.read_on.set()


async def go_on(scene: Scene) -> None:
    scene.let_go()


def leaving(scene: Scene) -> Manners:
    return Manners(leave=scene.leave)


def half_closing(_: Scene) -> Manners:
    return Manners(half_close=True)


def pausing(scene: Scene) -> Manners:
    scene.read_on.set()
    return Manners(read_on=scene.read_on)


def slow(_: Scene) -> Manners:
    return Manners(bytes_per_s=8192)

"""What an operator may order of a proxy, and the lines that answer."""

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

import msgspec

from neuron_di.errors import BadRequest, ClientError, NeuronDiError, TooLarge
from neuron_di.types import WORKER_ID_PATTERN, Role
from neuron_di.wire import Failed
from neuron_di.wire.admin import ORDER_BYTES_MAX, DrainProgress, Seconds
from neuron_di_proxy.body_refusal import check_json
from neuron_di_proxy.failure import failure_of
from neuron_di_proxy.json_object import explain

Phase = Literal[
    "ordered", "prepared", "draining", "drained", "left", "ended", "serving", "tested", "done",
    "failed",
]  # fmt: skip

_WorkerName = Annotated[str, msgspec.Meta(pattern=rf"\A{WORKER_ID_PATTERN}\Z")]


class NotHere(ClientError):
    """Raised when an order that shows no key comes from elsewhere, or may be a web page's."""

    http_status = 403
    code = "order_not_taken"


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """End a worker once everything that runs there is over."""

    worker: _WorkerName
    timeout_s: Seconds | None = None
    force: bool = False  # also where no other worker could do what it does


class RoleRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Give a worker another role."""

    worker: _WorkerName
    role: Role
    timeout_s: Seconds | None = None
    force: bool = False


Order = TypeVar("Order", DrainRequest, RoleRequest)


class AdminLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What has just been reached. `done` or `failed` comes once, last.

    `is_clean`, of the last line: nothing failed and nothing was cut.
    """

    phase: Phase
    words: str = ""
    progress: DrainProgress | None = None
    failed: Failed | None = None
    is_clean: bool = True


def failed_line(error: NeuronDiError) -> AdminLine:
    """The last line of an order that failed."""
    return AdminLine(phase="failed", words=error.message, failed=failure_of(error), is_clean=False)


def read_order(kind: type[Order], headers: Mapping[str, str], body: bytes) -> Order:
    """A DrainRequest or a RoleRequest. Raises BadRequest, NotJson or TooLarge."""
    check_json(headers)
    if len(body) > ORDER_BYTES_MAX:
        raise TooLarge(f"an order has at most {ORDER_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadRequest("the order is not JSON") from None


def check_sender(headers: Mapping[str, str], address: str) -> None:
    """Whether an order may be taken where there are no keys: from loopback, of no web page.

    Such a page may be open here, and have made its own name mean this machine: then Origin or
    Host tell. `address` is the client's. Raises NotHere.
    """
    if not _is_loopback(address):
        raise NotHere(
            "orders that do not come over loopback need an operator's key: give --api-keys"
        )
    if "origin" in headers:
        raise NotHere("an order of a web page needs an operator's key: give --api-keys")
    host = headers.get("host", "")
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower() != "localhost" and _ip(name) is None:
        raise NotHere(
            "without keys (--api-keys) an order is sent to an IP address or localhost, by no name"
        )


def _is_loopback(address: str) -> bool:
    ip = _ip(address)
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip
    return ip is not None and ip.is_loopback


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None

"""Who a request comes from: `Authorization: Bearer ndi-<id>-<secret>`, and nothing else.

Every answer takes the same work, one digest and one comparison in constant time, whether a key
is right, wrong, unknown, expired or missing: how long it took tells nothing.
"""

import hmac
from collections.abc import Mapping
from pathlib import Path

from neuron_di.clock import now_s
from neuron_di.errors import ConfigError, Forbidden, Unauthorized
from neuron_di.obs import get_logger
from neuron_di.seen_file import Seen, look_at
from neuron_di_proxy.key_file import (
    KEY_TEXT,
    OTHERS_MAY_READ,
    KeyFileUnread,
    KeyRecord,
    digest_of,
    is_expired,
    read_key_file,
)
from neuron_di_proxy.tenant import EVERYBODY, Tenant

LOOK_INTERVAL_S = 1.0  # between two looks at whether the file changed
# What load balancers and supervisors ask, who have no key.
OPEN_PATHS = frozenset({"/health", "/live", "/ping", "/ready"})
# They show every tenant's doings, or change what serves all of them.
OPERATOR_PATHS = frozenset({"/metrics", "/status", "/admin/drain", "/admin/role"})

_NO_DIGEST = "0" * 64  # compared with where there is no key

_log = get_logger(__name__)


class Keys:
    """The keys of a file, re-read when it changes. Without a file everybody may come.

    Owned by one event loop. ConfigError when the file is no good at the start; later the last
    good one stays in force and the log says so.
    """

    def __init__(self, path: str | None, num_processes: int = 1) -> None:
        self._num_processes = num_processes  # each gives a tenant its part
        self._path = None if path is None else Path(path)
        self._keys: dict[str, KeyRecord] = {}
        self._tenants: dict[str, Tenant] = {}  # by key id
        self._seen: Seen | None = None
        self._not_read = ""  # why, when it was last looked at
        self._look_again_s = 0.0
        if self._path is not None:
            self._seen = look_at(self._path)
            self._take(read_key_file(self._path))
            self._look_again_s = now_s() + LOOK_INTERVAL_S

    @property
    def are_asked_for(self) -> bool:
        """False where everybody may come."""
        return self._path is not None

    def tenant_of(self, authorization: str | None) -> Tenant:
        """The tenant that the header's key belongs to. Unauthorized when there is none."""
        if self._path is None:
            return EVERYBODY
        if now_s() >= self._look_again_s:
            self._look()
        scheme, _, text = (authorization or "").partition(" ")
        shape = KEY_TEXT.fullmatch(text)
        key_id, secret = shape.groups() if shape else ("", "")
        record = self._keys.get(key_id)
        digest = digest_of(secret)
        is_right = hmac.compare_digest(digest, _NO_DIGEST if record is None else record.sha256)
        if record is None or not is_right or scheme.lower() != "bearer":
            raise Unauthorized(
                "no API key was given: send 'Authorization: Bearer KEY'"
                if scheme.lower() != "bearer"
                else "the API key is not valid"
            )
        if is_expired(record):
            raise Unauthorized("the API key has expired")
        return self._tenants[key_id]

    def _look(self) -> None:
        assert self._path is not None, "without a file there is nothing to look at"
        self._look_again_s = now_s() + LOOK_INTERVAL_S
        found = look_at(self._path)
        if found == self._seen:
            return
        self._seen = found
        try:
            self._take(read_key_file(self._path))
        except ConfigError as error:
            if isinstance(error, KeyFileUnread):  # what it says now is not known: look again
                self._seen = None
            if error.message != self._not_read:
                _log.error("keys_not_read", reason=error.message, keys_in_force=len(self._keys))
            self._not_read = error.message
        else:
            self._not_read = ""

    def _take(self, keys: dict[str, KeyRecord]) -> None:
        self._keys = keys
        num = self._num_processes
        self._tenants = {key_id: record.limits().part(num) for key_id, record in keys.items()}
        _log.info("keys_read", keys=len(keys))
        if self._seen is not None and self._seen.mode & OTHERS_MAY_READ:
            # It holds digests only, but names all tenants.
            _log.warning("keys_readable", reason="others may read the key file: chmod 600 it")


def authorize(keys: Keys, path: str, headers: Mapping[str, str]) -> Tenant:
    """Who asks for `path`. Names in `headers` are lower case.

    Raises Unauthorized without a valid key, for paths that do not exist, too; Forbidden where the
    key is not an operator's and the path shows other tenants.
    """
    if path in OPEN_PATHS:
        return EVERYBODY
    tenant = keys.tenant_of(headers.get("authorization"))
    if path in OPERATOR_PATHS and not tenant.is_operator:
        raise Forbidden("this needs an operator's key: neuron-di key create --operator")
    return tenant

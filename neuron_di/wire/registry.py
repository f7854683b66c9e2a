"""What a worker and the embedded registry say to each other over ZMQ.

    worker (DEALER)                     registry (ROUTER)
    GrantLease        ->
                      <-                LeaseGranted
    PutKey            ->
                      <-                KeyPut
    KeepLeaseAlive    ->                                  every third of the lease's duration
                      <-                LeaseRemaining    0: unknown, announce anew
    RevokeLease       ->
                      <-                LeaseRevoked
    ListKeys          ->                                  further proxy processes
                      <-                KeysListed        at once, or at the next change

Every request carries a number, `call`, which its answer repeats. A request that is refused is
answered with RegistryRefused; so is a message that cannot be decoded, with `call` 0.
"""

import msgspec

from neuron_di.wire.codec import Decoder

REGISTRY_BYTES_MAX = 128 << 10  # one message: a value of RECORD_BYTES_MAX, its key, and room


class GrantLease(msgspec.Struct, frozen=True, kw_only=True, tag="grant_lease"):
    call: int
    ttl_s: float


class PutKey(msgspec.Struct, frozen=True, kw_only=True, tag="put_key"):
    call: int
    key: str
    value: bytes
    lease: int


class KeepLeaseAlive(msgspec.Struct, frozen=True, kw_only=True, tag="keep_lease_alive"):
    call: int
    lease: int


class RevokeLease(msgspec.Struct, frozen=True, kw_only=True, tag="revoke_lease"):
    call: int
    lease: int


class ListKeys(msgspec.Struct, frozen=True, kw_only=True, tag="list_keys"):
    """Ask for the keys behind `after`. `seen` is the version that the asker has all of.

    Where that is all there is, the answer may come as late as `wait_s`, or at the next change.
    """

    call: int
    prefix: str
    after: str = ""
    seen: str = ""
    wait_s: float = 0.0


class LeaseGranted(msgspec.Struct, frozen=True, kw_only=True, tag="lease_granted"):
    call: int
    lease: int


class KeyPut(msgspec.Struct, frozen=True, kw_only=True, tag="key_put"):
    call: int


class LeaseRemaining(msgspec.Struct, frozen=True, kw_only=True, tag="lease_remaining"):
    call: int
    ttl_s: float


class LeaseRevoked(msgspec.Struct, frozen=True, kw_only=True, tag="lease_revoked"):
    call: int


class KeysListed(msgspec.Struct, frozen=True, kw_only=True, tag="keys_listed"):
    """A page of keys, in order. `version` names all there is at one moment of one registry.

    Without `values` it is the version that was seen. `is_last`: no key comes behind this page.
    """

    call: int
    version: str
    values: dict[str, bytes] | None
    is_last: bool


class RegistryRefused(msgspec.Struct, frozen=True, kw_only=True, tag="registry_refused"):
    call: int
    reason: str


RegistryCall = GrantLease | PutKey | KeepLeaseAlive | RevokeLease | ListKeys
RegistryAnswer = (
    LeaseGranted | KeyPut | LeaseRemaining | LeaseRevoked | KeysListed | RegistryRefused
)

registry_call_decoder: Decoder[RegistryCall] = Decoder(
    RegistryCall, bytes_max=REGISTRY_BYTES_MAX, as_json=False
)
registry_answer_decoder: Decoder[RegistryAnswer] = Decoder(
    RegistryAnswer, bytes_max=REGISTRY_BYTES_MAX, as_json=False
)

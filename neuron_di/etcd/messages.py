"""etcd's v3 messages and calls, from their public field numbers.

The classes are made at import, so no generated code binds us to a version of protobuf: 3.20 to
7 work alike. They sit in a pool of their own, beside whatever another library has loaded. Fields
that nobody here needs are left out: they are skipped when a message is read.
"""

from dataclasses import dataclass
from typing import Any

from neuron_di.etcd.packages import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "etcdserverpb"

# Message, then each field as "name number type"; [Type] repeats, a capital begins a message.
# An enum is an int32 on the wire, and is one here.
_SPEC = {
    "ResponseHeader": "cluster_id 1 uint64, member_id 2 uint64, revision 3 int64, "
    "raft_term 4 uint64",
    "KeyValue": "key 1 bytes, create_revision 2 int64, mod_revision 3 int64, version 4 int64, "
    "value 5 bytes, lease 6 int64",
    "RangeRequest": "key 1 bytes, range_end 2 bytes, limit 3 int64, revision 4 int64, "
    "sort_order 5 int32, sort_target 6 int32, serializable 7 bool, keys_only 8 bool, "
    "count_only 9 bool",
    "RangeResponse": "header 1 ResponseHeader, kvs 2 [KeyValue], more 3 bool, count 4 int64",
    "PutRequest": "key 1 bytes, value 2 bytes, lease 3 int64, prev_kv 4 bool",
    "PutResponse": "header 1 ResponseHeader, prev_kv 2 KeyValue",
    "DeleteRangeRequest": "key 1 bytes, range_end 2 bytes, prev_kv 3 bool",
    "DeleteRangeResponse": "header 1 ResponseHeader, deleted 2 int64, prev_kvs 3 [KeyValue]",
    "RequestOp": "request_range 1 RangeRequest, request_put 2 PutRequest, "
    "request_delete_range 3 DeleteRangeRequest",
    "ResponseOp": "response_range 1 RangeResponse, response_put 2 PutResponse, "
    "response_delete_range 3 DeleteRangeResponse",
    "Compare": "result 1 int32, target 2 int32, key 3 bytes, version 4 int64, "
    "create_revision 5 int64, mod_revision 6 int64, value 7 bytes, lease 8 int64",
    "TxnRequest": "compare 1 [Compare], success 2 [RequestOp], failure 3 [RequestOp]",
    "TxnResponse": "header 1 ResponseHeader, succeeded 2 bool, responses 3 [ResponseOp]",
    "CompactionRequest": "revision 1 int64, physical 2 bool",
    "CompactionResponse": "header 1 ResponseHeader",
    "LeaseGrantRequest": "TTL 1 int64, ID 2 int64",
    "LeaseGrantResponse": "header 1 ResponseHeader, ID 2 int64, TTL 3 int64, error 4 string",
    "LeaseRevokeRequest": "ID 1 int64",
    "LeaseRevokeResponse": "header 1 ResponseHeader",
    "LeaseKeepAliveRequest": "ID 1 int64",
    "LeaseKeepAliveResponse": "header 1 ResponseHeader, ID 2 int64, TTL 3 int64",
    "LeaseTimeToLiveRequest": "ID 1 int64, keys 2 bool",
    "LeaseTimeToLiveResponse": "header 1 ResponseHeader, ID 2 int64, TTL 3 int64, "
    "grantedTTL 4 int64, keys 5 [bytes]",
    "WatchCreateRequest": "key 1 bytes, range_end 2 bytes, start_revision 3 int64, "
    "progress_notify 4 bool, filters 5 [int32], prev_kv 6 bool, watch_id 7 int64, "
    "fragment 8 bool",
    "WatchCancelRequest": "watch_id 1 int64",
    "WatchProgressRequest": "",
    "WatchRequest": "create_request 1 WatchCreateRequest, cancel_request 2 WatchCancelRequest, "
    "progress_request 3 WatchProgressRequest",
    "Event": "type 1 int32, kv 2 KeyValue, prev_kv 3 KeyValue",
    "WatchResponse": "header 1 ResponseHeader, watch_id 2 int64, created 3 bool, "
    "canceled 4 bool, compact_revision 5 int64, cancel_reason 6 string, fragment 7 bool, "
    "events 11 [Event]",
    "AuthenticateRequest": "name 1 string, password 2 string",
    "AuthenticateResponse": "header 1 ResponseHeader, token 2 string",
    "StatusRequest": "",
    "StatusResponse": "header 1 ResponseHeader, version 2 string, dbSize 3 int64, "
    "leader 4 uint64, raftIndex 5 uint64, raftTerm 6 uint64, errors 8 [string]",
}


def _file_of(spec: dict[str, str]) -> descriptor_pb2.FileDescriptorProto:
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="neuron_di/etcd.proto", package=PACKAGE, syntax="proto3"
    )
    for name, written in spec.items():
        message = file.message_type.add(name=name)
        for field in filter(None, written.split(", ")):
            field_name, number, kind = field.split(" ")
            is_repeated, kind = kind.startswith("["), kind.strip("[]")
            declared = message.field.add(
                name=field_name,
                number=int(number),
                label=kinds.LABEL_REPEATED if is_repeated else kinds.LABEL_OPTIONAL,
            )
            if kind[0].isupper():
                declared.type, declared.type_name = kinds.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
            else:
                declared.type = getattr(kinds, f"TYPE_{kind.upper()}")
    return file


def _classes_of(spec: dict[str, str]) -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(_file_of(spec).SerializeToString())
    descriptors = {name: pool.FindMessageTypeByName(f"{PACKAGE}.{name}") for name in spec}
    if hasattr(message_factory, "GetMessageClass"):  # protobuf 4.22 and later
        make = message_factory.GetMessageClass
    else:
        make = message_factory.MessageFactory(pool).GetPrototype
    return {name: make(each) for name, each in descriptors.items()}


_classes = _classes_of(_SPEC)

RangeRequest = _classes["RangeRequest"]
PutRequest = _classes["PutRequest"]
DeleteRangeRequest = _classes["DeleteRangeRequest"]
RequestOp = _classes["RequestOp"]
Compare = _classes["Compare"]
TxnRequest = _classes["TxnRequest"]
CompactionRequest = _classes["CompactionRequest"]
LeaseGrantRequest = _classes["LeaseGrantRequest"]
LeaseRevokeRequest = _classes["LeaseRevokeRequest"]
LeaseKeepAliveRequest = _classes["LeaseKeepAliveRequest"]
LeaseTimeToLiveRequest = _classes["LeaseTimeToLiveRequest"]
WatchRequest = _classes["WatchRequest"]
WatchCreateRequest = _classes["WatchCreateRequest"]
WatchProgressRequest = _classes["WatchProgressRequest"]
AuthenticateRequest = _classes["AuthenticateRequest"]
StatusRequest = _classes["StatusRequest"]


@dataclass(frozen=True, slots=True)
class Method:
    """One call of etcd's: where it is, and how its messages are written and read."""

    path: str
    request: Any
    response: Any
    is_stream: bool = False


def _method(service: str, name: str, message: str = "", *, is_stream: bool = False) -> Method:
    message = message or name
    return Method(
        f"/{PACKAGE}.{service}/{name}",
        _classes[f"{message}Request"],
        _classes[f"{message}Response"],
        is_stream,
    )


RANGE = _method("KV", "Range")
PUT = _method("KV", "Put")
DELETE_RANGE = _method("KV", "DeleteRange")
TXN = _method("KV", "Txn")
COMPACT = _method("KV", "Compact", "Compaction")
LEASE_GRANT = _method("Lease", "LeaseGrant")
LEASE_REVOKE = _method("Lease", "LeaseRevoke")
LEASE_KEEP_ALIVE = _method("Lease", "LeaseKeepAlive", is_stream=True)
LEASE_TIME_TO_LIVE = _method("Lease", "LeaseTimeToLive")
WATCH = _method("Watch", "Watch", is_stream=True)
AUTHENTICATE = _method("Auth", "Authenticate")
STATUS = _method("Maintenance", "Status")

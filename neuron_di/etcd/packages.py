"""gRPC and protobuf, which come with the extra `etcd` only. Whoever needs them gets them here."""

import os

from neuron_di.errors import ConfigError

# What its core writes to standard error would be a second, unreadable log: we report failures.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # what we fork becomes another program

try:
    import grpc
    import grpc.aio
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
except ImportError as error:
    raise ConfigError(
        f"etcd needs packages that are not installed ({error.name}): pip install '.[etcd]' in "
        "neuron-di's folder"
    ) from None

__all__ = ["descriptor_pb2", "descriptor_pool", "grpc", "message_factory"]

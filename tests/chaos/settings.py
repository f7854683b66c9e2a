"""How the processes of a cluster are set up."""

from .cluster import Settings

# What users get, but for the budget of retries, as here every request meets a fault, and for
# the time that a request waits when no worker is left.
DEFAULTS = Settings(proxy={"retry_share": 100, "queue_timeout_s": 10.0})

# The same, with less patience: a quick run spends its time waiting for what is silent.
QUICK = Settings(
    proxy={
        "retry_share": 100,
        "probe_interval_s": 0.2,
        "freeze_timeout_s": 1.0,
        "idle_timeout_s": 4.0,
        "stall_timeout_s": 4.0,
        "queue_timeout_s": 20.0,
        "request_timeout_s": 50.0,
    },
    worker={
        "heartbeat_s": 0.2,
        "peer_silence_s": 1.5,
        "peer_connect_timeout_s": 1.5,
        "kv_lease_s": 3.0,
        "quarantine_s": 2.0,
        "transfer_timeout_s": 2.0,
    },
)

"""How the processes of a run are set up, and how long is waited for what they leave."""

from chaos.cluster import Settings

# What users get.
DEFAULTS = Settings()
LEAK_TIMEOUT_S = 50.0  # leases of KV and quarantines end before
KEY_TIMEOUT_S = 15.0  # the lease of a worker that was killed ends before

# The same, with less patience for what nobody will ever fetch: the suite waits for it.
QUICK = Settings(
    worker={"etcd_ttl_s": 2, "kv_lease_s": 4.0, "quarantine_s": 2.0},
)
QUICK_LEAK_TIMEOUT_S = 20.0
QUICK_KEY_TIMEOUT_S = 8.0

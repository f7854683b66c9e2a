"""Workers that come, go, change and fail under load, found through a real etcd that fails, too.

Run alone: `make dynamic`, `make dynamic FAULTS=etcd`.
"""

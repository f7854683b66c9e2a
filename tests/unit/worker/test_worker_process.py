"""What a worker refuses before it loads anything."""

import pytest

from neuron_di.config import HandOverOptions, WorkerOptions
from neuron_di.errors import CheckpointError, ConfigError
from neuron_di.worker import run_worker


def test_a_silence_shorter_than_two_heartbeats_is_refused(tmp_path):
    limits = HandOverOptions(heartbeat_s=3.0, peer_silence_s=5.0)
    options = WorkerOptions(model=str(tmp_path / "none"), role="decode", hand_over=limits)
    with pytest.raises(ConfigError, match="peer-silence-s 5 is less than two heartbeats"):
        run_worker(options)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "some-name"])
def test_where_others_reach_it_a_worker_starts_only_on_an_operators_word(tmp_path, host):
    none = str(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"can be reached from other machines.*--insecure"):
        run_worker(WorkerOptions(model=none, role="decode", host=host))
    with pytest.raises(CheckpointError):  # it came to the model
        run_worker(WorkerOptions(model=none, role="decode", host=host, insecure=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_on_loopback_a_worker_just_starts(tmp_path, host):
    with pytest.raises(CheckpointError):
        run_worker(WorkerOptions(model=str(tmp_path / "none"), role="decode", host=host))

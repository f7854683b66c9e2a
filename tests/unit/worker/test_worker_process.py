"""What a worker refuses before it loads anything."""

import pytest

from neuron_di.config import HandOverOptions, WorkerOptions
from neuron_di.errors import ConfigError
from neuron_di.worker import run_worker


def test_a_silence_shorter_than_two_heartbeats_is_refused(tmp_path):
    limits = HandOverOptions(heartbeat_s=3.0, peer_silence_s=5.0)
    options = WorkerOptions(model=str(tmp_path / "none"), role="decode", hand_over=limits)
    with pytest.raises(ConfigError, match="peer-silence-s 5 is less than two heartbeats"):
        run_worker(options)

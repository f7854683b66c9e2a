"""TLS on the control connection between two devices."""

import shutil
import subprocess

import pytest
from nrt_kit import LAYOUT, PREFILL, one_end, two_ends

from neuron_di.config import TransferOptions
from neuron_di.errors import PeerError, PeerRefused
from neuron_di.types import Incarnation

OTHER = Incarnation("ab" * 16)


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Two workers' options, each with an authority of its own."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the keys")
    folder = tmp_path_factory.mktemp("pem")
    made = []
    for name in ("one", "other"):
        key, cert = folder / f"{name}.key", folder / f"{name}.pem"
        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
        files = ("-keyout", str(key), "-out", str(cert), "-subj", f"/CN={name}")
        command = ["openssl", "req", "-x509", *new_key, *files]
        subprocess.run(command, check=True, capture_output=True)
        files = {"transfer_tls_cert": str(cert), "transfer_tls_key": str(key)}
        made.append(TransferOptions(**files, transfer_tls_ca=str(cert)))
    return made


def test_devices_are_linked_over_tls(options):
    with two_ends(engine={"options": options[0]}) as two:
        assert two.decode.engine.local_region(PREFILL).is_tls
        for number in (1, 2):
            assert two.move([number], [number]).error() is None
            assert (two.decode.blocks[number] == two.prefill.blocks[number]).all()
        two.decode.engine.disconnect(PREFILL)
        two.link()
        assert two.move([3], [3]).error() is None


def test_who_has_another_authority_or_none_is_not_linked(options):
    with two_ends(engine={"options": options[0]}) as two:
        for other in (options[1], None):
            with one_end(OTHER, engine={"options": other} if other else None) as stranger:
                region = stranger.engine.local_region(PREFILL)
                if other is None:
                    with pytest.raises(PeerRefused, match="TLS"):
                        two.prefill.engine.accept(OTHER, region, LAYOUT)
                else:
                    two.prefill.engine.accept(OTHER, region, LAYOUT)
                own = two.prefill.engine.local_region(OTHER)
                with pytest.raises(PeerError):
                    stranger.engine.connect(PREFILL, own, LAYOUT)
        assert two.move([1], [1]).error() is None

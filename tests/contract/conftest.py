import pytest

from .engine_kinds import KINDS
from .transfer_pair import connected_pair


@pytest.fixture(params=[kind.name for kind in KINDS.values() if not kind.is_variant])
def kind(request):
    """Each kind of transfer engine that can run here."""
    kind = KINDS[request.param]
    if kind.why_not is not None:
        pytest.skip(kind.why_not)
    return kind


@pytest.fixture
def pair(kind):
    with connected_pair(kind.name) as pair:
        yield pair

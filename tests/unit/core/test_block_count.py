"""Conservation of blocks, as numbers."""

import pytest

from neuron_di.core import BlockCount
from neuron_di.errors import LocalProtocolError

PLACES = ("free", "running", "parked", "receiving", "cached", "quarantined")
COUNT = dict(zip(PLACES, (1, 2, 3, 4, 5, 6), strict=True))


def test_places_that_add_up_pass():
    BlockCount(total=21, **COUNT).check()
    BlockCount(total=0, free=0).check()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", [-1, 1])
def test_a_block_that_is_lost_or_doubled_is_noticed(place, change):
    with pytest.raises(LocalProtocolError, match="do not add up"):
        BlockCount(total=21, **{**COUNT, place: COUNT[place] + change}).check()


def test_less_than_nothing_is_noticed():
    with pytest.raises(LocalProtocolError, match="do not add up"):
        BlockCount(total=1, free=2, running=-1).check()

import pytest

from neuron_di.errors import ConfigError
from neuron_di.transfer_bench.shape import Shape


@pytest.mark.parametrize(
    ("text", "num_blocks", "block_bytes", "shown"),
    [
        ("64KiB", 1, 65_536, "64KiB"),
        ("1GiB", 1, 1 << 30, "1GiB"),
        ("4096x16KiB", 4096, 16_384, "4096x16KiB"),
        (" 16384X4kib ", 16_384, 4096, "16384x4KiB"),
        ("2x2048KiB", 2, 2 << 20, "2x2MiB"),
        ("3x256B", 3, 256, "3x256B"),
        ("1x1024KB", 1, 1_024_000, "1000KiB"),
    ],
)
def test_a_shape_is_read_and_shown(text, num_blocks, block_bytes, shown):
    shape = Shape.of(text)
    assert (shape.num_blocks, shape.block_bytes) == (num_blocks, block_bytes)
    assert shape.num_bytes == num_blocks * block_bytes
    assert str(shape) == shown
    assert Shape.of(str(shape)) == shape
    assert shape.layout().block_bytes == block_bytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "16", "x16KiB", "-1x4KiB", "0x4KiB", "4x0KiB", "4096x", "1TiB", "1.5MiB", "4KiBx4"),
        *("1e3KiB", "100B", "999999999x4KiB", "268435712B", "4x4KiB4", "9" * 30 + "KiB"),
        *("4x4 KiB", "\N{ARABIC-INDIC DIGIT TWO}x4KiB"),
    ],
)
def test_what_is_no_shape_is_refused_by_name(text):
    with pytest.raises(ConfigError):
        Shape.of(text)


def test_a_pool_has_room_for_the_shape_and_is_as_large_as_asked_for():
    shape = Shape.of("4x16KiB")
    assert shape.pool_blocks(0) == 4
    assert shape.pool_blocks(1 << 20) == 64
    assert shape.pool_blocks((1 << 20) + 1) == 65

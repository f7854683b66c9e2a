import pytest

pytest.register_assert_rewrite("arena_kit", "kv_kit")

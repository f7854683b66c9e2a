"""Texts cut into pieces in any way, as tokens cut them."""

from hypothesis import strategies as st


@st.composite
def cuts(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> tuple[str, list[str]]:
    """A text, and pieces that it is made of; some may be empty."""
    text = draw(texts)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    ends = [*places, len(text)]
    return text, [text[a:b] for a, b in zip([0, *places], ends, strict=True)]


_numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | _numbers | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizer_kit import KINDS, library_tokenizer, make_tokenizer

from neuron_di.request import OutputText, Tokenizer
from neuron_di.request.chat_template import ChatTemplate

kinds = pytest.mark.parametrize("kind", KINDS)

# Few letters, so that stop strings overlap with themselves, each other and the text.
letters = st.text(alphabet="abé你🎉 \ufffd", max_size=30)
stop_strings = st.lists(
    st.one_of(
        st.text(alphabet="abé你🎉 \ufffd", min_size=1, max_size=4), st.text(min_size=1, max_size=3)
    ),
    max_size=4,
).map(tuple)
random_ids = st.lists(st.integers(0, 420), max_size=40)


def cut_at_first_stop(text, stop):
    """The definition, one character after the other: (text before, stop string found)."""
    for end in range(len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def make_output(kind, stop=(), *, skip=True, min_tokens=0, prompt_ids=()):
    return OutputText(
        make_tokenizer(kind),
        stop=stop,
        skip_special_tokens=skip,
        min_tokens=min_tokens,
        prompt_ids=prompt_ids,
    )


def check(kind, ids, stop, skip):
    output = make_output(kind, stop, skip=skip)
    pieces = []
    for token_id in ids:
        pieces.append(output.push(token_id))
        if output.stop_hit is not None:
            break
    pieces.append(output.flush())
    whole = make_tokenizer(kind).decode(ids, skip_special_tokens=skip)
    expected_text, expected_stop = cut_at_first_stop(whole, stop)
    assert ("".join(pieces), output.stop_hit) == (expected_text, expected_stop)
    return pieces


@kinds
@given(text=st.one_of(st.text(), letters), stop=stop_strings, skip=st.booleans())
@example(text="aab", stop=("ab", "aab", "b"), skip=True)
@example(text="aaaaab", stop=("aaab",), skip=True)
def test_unicode_text_in_pieces_is_the_whole_text(kind, text, stop, skip):
    pieces = check(kind, make_tokenizer(kind).encode(text), stop, skip)
    if "\ufffd" not in text:  # half a character is never sent
        assert not any("\ufffd" in piece for piece in pieces)


@kinds
@given(ids=random_ids, stop=stop_strings, skip=st.booleans())
def test_random_ids_in_pieces_are_the_whole_text(kind, ids, stop, skip):
    check(kind, ids, stop, skip)


@given(ids=random_ids, skip=st.booleans())
def test_byte_level_pieces_are_the_librarys_text(ids, skip):
    output = make_output("byte_level", skip=skip)
    text = "".join(map(output.push, ids)) + output.flush()
    assert text == library_tokenizer("byte_level").decode(ids, skip_special_tokens=skip)


@kinds
@given(text=letters, stop=stop_strings, shared=st.integers(0, 20))
def test_the_state_is_a_function_of_the_ids(kind, text, stop, shared):
    """What two workers hold back after the same ids is the same."""
    ids = make_tokenizer(kind).encode(text)
    prefill, decode = make_output(kind, stop), make_output(kind, stop)
    sent = [prefill.push(token_id) for token_id in ids[:shared]]
    assert [decode.push(token_id) for token_id in ids[:shared]] == sent
    assert prefill.stop_hit == decode.stop_hit
    assert prefill.flush() == decode.flush()


@kinds
@given(text=letters, stop=stop_strings, min_tokens=st.integers(0, 20))
def test_stop_strings_that_end_before_min_tokens_do_not_count(kind, text, stop, min_tokens):
    tokenizer = make_tokenizer(kind)
    ids = tokenizer.encode(text)
    output = make_output(kind, stop, min_tokens=min_tokens)
    sent = ""
    for num_tokens, token_id in enumerate(ids, start=1):
        sent += output.push(token_id)
        if output.stop_hit is not None:
            assert num_tokens >= min_tokens
            break
    assert tokenizer.decode(ids, skip_special_tokens=True).startswith(sent)
    if output.stop_hit is None and len(ids) < min_tokens:
        assert sent + output.flush() == tokenizer.decode(ids, skip_special_tokens=True)


@given(
    text=st.text(alphabet="ab", max_size=12),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3).map(tuple),
    min_tokens=st.integers(0, 8),
)
@example(text="aaa", stop=("aa",), min_tokens=3)
def test_min_tokens_by_the_definition(text, stop, min_tokens):
    """One token per character, so the first stop string that may count is plain to see."""
    output = make_output("byte_level", stop, min_tokens=min_tokens)
    ids = [make_tokenizer("byte_level").encode(char)[0] for char in text]
    sent = "".join(map(output.push, ids)) + output.flush()
    for end in range(max(min_tokens, 1), len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            # A stop string that did not count is text, and sent before a longer one ends.
            assert (text[: end - len(longest)], longest) == (sent, output.stop_hit)
            return
    assert (text, None) == (sent, output.stop_hit)


def test_a_stop_string_may_begin_before_min_tokens():
    tokenizer = make_tokenizer("byte_level")
    ids = [tokenizer.encode(char)[0] for char in "xabab"]
    output = make_output("byte_level", ("ab",), min_tokens=5)
    assert [output.push(token_id) for token_id in ids] == ["x", "", "ab", "", ""]
    assert output.stop_hit == "ab"
    assert output.flush() == ""


@kinds
def test_half_a_character_is_held_back(kind):
    tokenizer = make_tokenizer(kind)
    ids = [
        next(i for i in range(tokenizer.num_vocab) if tokenizer.token_bytes(i) == bytes([byte]))
        for byte in "🎉".encode()
    ]
    output = make_output(kind)
    assert [output.push(token_id) for token_id in ids] == ["", "", "", "🎉"]
    stopped = make_output(kind, ("\n", "\ufffd"))
    assert [stopped.push(token_id) for token_id in ids[:3]] == ["", "", ""]
    assert stopped.flush() == ""
    assert stopped.stop_hit == "\ufffd"
    cut_short = make_output(kind)
    assert [cut_short.push(token_id) for token_id in ids[:3]] == ["", "", ""]
    assert cut_short.flush() == "\ufffd"


@kinds
def test_a_newline_is_sent_at_once(kind):
    """Also where it is a byte token, and a wrong byte could follow."""
    tokenizer = make_tokenizer(kind)
    newline = next(i for i in range(tokenizer.num_vocab) if tokenizer.token_bytes(i) == b"\n")
    assert make_output(kind).push(newline) == "\n"
    output = make_output(kind, ("\n",))
    output.push(newline)
    assert output.stop_hit == "\n"


@kinds
def test_nothing_comes_after_a_stop_string(kind):
    ids = make_tokenizer(kind).encode("hello END more")
    output = make_output(kind, ("END",))
    assert "".join(map(output.push, ids)) == "hello "
    assert output.stop_hit == "END"
    assert output.push(ids[0]) == ""
    assert output.flush() == ""


def test_only_what_may_begin_a_stop_string_is_held_back():
    tokenizer = make_tokenizer("byte_level")
    output = make_output("byte_level", ("aab", "ax"))
    ids = [tokenizer.encode(char)[0] for char in "aaac"]
    assert [output.push(token_id) for token_id in ids] == ["", "", "a", "aac"]


def test_special_tokens_are_text_when_they_are_not_skipped():
    tokenizer = make_tokenizer("byte_level")
    ids = tokenizer.encode("a<|end|>b")
    assert "".join(map(make_output("byte_level").push, ids)) == "ab"
    shown = make_output("byte_level", skip=False)
    assert "".join(map(shown.push, ids)) == "a<|end|>b"


def test_a_stop_string_that_the_flush_completes_is_not_sent():
    tokenizer = make_tokenizer("byte_level")
    half = next(i for i in range(tokenizer.num_vocab) if tokenizer.token_bytes(i) == b"\xf0")
    output = make_output("byte_level", ("a\ufffd",))
    assert [output.push(tokenizer.encode(char)[0]) for char in "ba"] == ["b", ""]
    assert output.push(half) == ""
    assert output.flush() == ""
    assert output.stop_hit == "a\ufffd"


def place_of(before, piece):
    """Where in the text the token of these bytes begins, behind those: the definition."""
    num_before = len(before.decode(errors="replace"))
    goes_on = len((before + piece[:1]).decode(errors="replace")) == num_before
    return num_before - 1 if piece and goes_on else num_before


@kinds
@given(ids=random_ids, stop=stop_strings)
@example(ids=[], stop=())
@example(ids=[182, 182, 0, 0], stop=())  # of one kind: two spaces, the first of which is no text
@example(ids=[419, 182, 0], stop=())  # also behind a token that has no text
def test_a_tokens_place_in_the_text_is_known_before_it_is_sent(kind, ids, stop):
    tokenizer = make_tokenizer(kind)
    output, num_sent, before = make_output(kind, stop, skip=False), 0, b""
    at_start = True
    for token_id in ids:
        piece = tokenizer.token_bytes(token_id, at_start=at_start)
        at_start &= not tokenizer.has_text(token_id, skip_special_tokens=False)
        if piece and before:
            assert num_sent + output.num_before(token_id) == place_of(before, piece)
        num_sent += len(output.push(token_id))
        before += piece
        if output.stop_hit is not None:
            break


@kinds
@pytest.mark.parametrize("last", [b"\xa0", b"a", b"\xed"])
def test_bytes_that_no_character_begins_with_are_broken_ones_at_once(kind, last):
    """Half a surrogate, which Python's decoder holds back like a character's beginning."""
    tokenizer = make_tokenizer(kind)
    ids = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.num_vocab)}
    output, before = make_output(kind), b""
    for piece in (b"\xed", b"\xa0", last):
        if before:  # nothing of it was sent
            assert output.num_before(ids[piece]) == place_of(before, piece)
        assert output.push(ids[piece]) == "" or piece == last
        before += piece


def test_a_token_behind_half_a_character_begins_behind_the_broken_one():
    tokenizer = make_tokenizer("byte_level")
    of_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.num_vocab)}
    output = make_output("byte_level")
    places, text = [], ""
    for piece in (b"$", b"\xe4", b"\xbd", b"5", b"\xe4", b"\xbd", b"\xa0"):
        places.append(len(text) + output.num_before(of_byte[piece]))
        text += output.push(of_byte[piece])
    assert (places, text) == ([0, 1, 1, 2, 3, 3, 3], "$\ufffd5你")


@kinds
@given(ids=random_ids, stop=stop_strings)
def test_a_stop_string_that_is_included_is_the_last_of_the_text(kind, ids, stop):
    cut, whole = (
        OutputText(
            make_tokenizer(kind),
            stop=stop,
            skip_special_tokens=True,
            min_tokens=0,
            include_stop=include_stop,
        )
        for include_stop in (False, True)
    )
    texts = ["".join(map(output.push, ids)) + output.flush() for output in (cut, whole)]
    assert whole.stop_hit == cut.stop_hit
    assert texts[1] == texts[0] + (cut.stop_hit or "")


@kinds
@given(prompt=st.one_of(st.just(""), letters), text=letters, skip=st.booleans())
@example(prompt="a", text=" b", skip=True)
@example(prompt="", text=" b", skip=True)
def test_the_text_is_what_the_ids_add_to_the_prompts(kind, prompt, text, skip):
    tokenizer = make_tokenizer(kind)
    prompt_ids = tokenizer.encode(prompt)
    ids = [i for i in tokenizer.encode("x" + text) if not tokenizer.is_special(i)]
    output = make_output(kind, skip=skip, prompt_ids=prompt_ids)
    written = "".join(map(output.push, ids)) + output.flush()
    before = tokenizer.decode(prompt_ids, skip_special_tokens=skip)
    assert before + written == tokenizer.decode(prompt_ids + ids, skip_special_tokens=skip)


def test_the_first_word_keeps_its_space_behind_a_prompt():
    tokenizer = make_tokenizer("sentencepiece")
    (space,) = (i for i in range(tokenizer.num_vocab) if tokenizer.token_piece(i) == "▁")
    word = tokenizer.encode("a", add_special_tokens=False)[-1]
    special = next(i for i in range(tokenizer.num_vocab) if tokenizer.is_special(i))
    for prompt_ids, expected in (((word,), " a"), ((special, word), " a"), ((special,), "a")):
        output = make_output("sentencepiece", stop=(" a",), prompt_ids=prompt_ids)
        text = output.push(space) + output.push(word) + output.flush()
        assert (text, output.stop_hit) == (("", " a") if expected == " a" else ("a", None))


@kinds
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("start", "end", "words"),
    [
        ("[THINK]", "[/THINK]", ""),
        ("<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}'),
        ("[TOOL_CALLS]", "[TOOL_CALLS]", ""),
    ],
)
def test_parts_are_marked_also_where_their_tags_are_special_tokens(kind, skip, start, end, words):
    backend = library_tokenizer(kind).from_str(library_tokenizer(kind).to_str())
    backend.add_special_tokens([start, end, "[REST]"])
    ids = [backend.token_to_id(tag) for tag in (start, end, "[REST]")]
    assert all(type(token_id) is int for token_id in ids)
    source = f"{start}{words}{{{{ messages[0].content }}}}{end}"
    tagged = Tokenizer(backend, chat_template=ChatTemplate(source, {}))
    output = OutputText(tagged, stop=(), skip_special_tokens=skip, min_tokens=0)
    rest = "" if skip else "[REST]"
    assert [output.push(token_id) for token_id in ids] == [start, end, rest]
    assert tagged.decode(ids, skip_special_tokens=skip) == start + end + rest
    assert all(tagged.is_special(token_id) for token_id in ids)

    plain = Tokenizer(backend, chat_template=ChatTemplate("{{ messages }}", {}))
    output = OutputText(plain, stop=(), skip_special_tokens=True, min_tokens=0)
    assert [output.push(token_id) for token_id in ids] == ["", "", ""]

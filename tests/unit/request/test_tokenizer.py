import json
import threading

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_kit import KINDS, byte_level_json, library_tokenizer, make_tokenizer, write_folder
from tokenizers.decoders import BPEDecoder, ByteLevel, Sequence, Strip
from transformers import AutoTokenizer

from neuron_di.errors import BadRequest, CheckpointError
from neuron_di.request import Tokenizer

TEXTS = [
    "",
    " ",
    "  two spaces first",
    "hello world",
    "naïve 你好 👩‍👩‍👧\n\ttab",
    "special <|end|> and </s> inside",
]
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
def test_encode_and_decode_equal_transformers(kind, tmp_path):
    ours = Tokenizer.load(write_folder(tmp_path, kind))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected
    assert ours.eos_id == theirs.eos_token_id
    assert ours.num_vocab == len(theirs)
    special = {i for i in range(ours.num_vocab) if ours.is_special(i)}
    assert special >= set(theirs.all_special_ids)


@kinds
@given(text=st.text())
def test_text_survives_the_round_trip(kind, text):
    tokenizer, library = make_tokenizer(kind), library_tokenizer(kind)
    ids = tokenizer.encode(text)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == library.decode(
            ids, skip_special_tokens=skip
        )


@given(ids=st.lists(st.integers(0, 420)), skip=st.booleans())
def test_any_byte_level_ids_decode_as_the_library_does(ids, skip):
    ours, library = make_tokenizer("byte_level"), library_tokenizer("byte_level")
    assert ours.decode(ids, skip_special_tokens=skip) == library.decode(
        ids, skip_special_tokens=skip
    )


@given(ids=st.lists(st.integers(0, 420)), skip=st.booleans())
def test_any_sentencepiece_ids_decode_as_the_library_does_when_they_are_unicode(ids, skip):
    ours, library = make_tokenizer("sentencepiece"), library_tokenizer("sentencepiece")
    expected = library.decode(ids, skip_special_tokens=skip)
    text = ours.decode(ids, skip_special_tokens=skip)
    if "\ufffd" in expected:
        assert "\ufffd" in text
    else:
        assert text == expected


@pytest.mark.parametrize("first", ["<0x20>", "▁", "▁▁▁", "<0x41>"])
def test_one_space_is_dropped_at_the_start_of_a_sentencepiece_text(first):
    library = library_tokenizer("sentencepiece")
    ids = [library.token_to_id(token) for token in ("</s>", first, "▁", first)]
    expected = library.decode(ids, skip_special_tokens=True)
    tokenizer = make_tokenizer("sentencepiece")
    assert tokenizer.decode(ids, skip_special_tokens=True) == expected


def test_good_characters_of_a_bad_run_of_byte_tokens_stay():
    tokenizer = make_tokenizer("sentencepiece")
    library = library_tokenizer("sentencepiece")
    ids = [library.token_to_id(f"<0x{byte:02X}>") for byte in (0xE4, 0xBD, 0xA0, 0xFF)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "你\ufffd"


@kinds
def test_token_bytes_add_up_to_the_text(kind):
    tokenizer = make_tokenizer(kind)
    text = "hello naïve 你好 👩‍👩‍👧 world"
    ids = [i for i in tokenizer.encode(text) if not tokenizer.is_special(i)]
    joined = b"".join(tokenizer.token_bytes(i) for i in ids)
    # In the middle of a text a SentencePiece token keeps the space it begins with.
    assert joined.removeprefix(b" ") == text.encode()


def test_a_decoder_may_be_a_sequence_of_one():
    backend = library_tokenizer("byte_level").from_str(library_tokenizer("byte_level").to_str())
    backend.decoder = Sequence([ByteLevel()])
    tokenizer, text = Tokenizer(backend), "naïve 你好 👩"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (BPEDecoder(suffix="s"), "BPEDecoder"),  # a space behind a word only if one follows
        (Sequence([ByteLevel(), Strip("\n", 0, 1)]), "Sequence"),  # of halves of characters
    ],
)
def test_a_decoder_that_no_stream_can_follow_is_refused_by_name(tmp_path, decoder, named):
    backend = tokenizers.Tokenizer.from_str(byte_level_json())
    backend.decoder = decoder
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json: its decoder \({named}\)"):
        Tokenizer.load(tmp_path)


@kinds
def test_half_a_character_reads_as_its_bytes(kind):
    tokenizer = make_tokenizer(kind)
    half = next(i for i in range(tokenizer.num_vocab) if tokenizer.token_bytes(i) == b"\xf0")
    assert tokenizer.token_text(half) == "\\xf0"


@kinds
def test_ids_outside_the_vocabulary_have_no_text(kind):
    tokenizer = make_tokenizer(kind)
    beyond = tokenizer.num_vocab + 5
    assert tokenizer.token_bytes(beyond) == b""
    assert tokenizer.token_text(beyond) == ""
    assert not tokenizer.is_special(beyond)
    ids = tokenizer.encode("hello")
    assert tokenizer.decode([beyond, *ids], skip_special_tokens=True) == "hello"


@kinds
def test_a_lone_surrogate_is_the_clients_mistake(kind):
    with pytest.raises(BadRequest, match="Unicode") as caught:
        make_tokenizer(kind).encode("\ud800")
    assert caught.value.param == "prompt"


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path):
    write_folder(tmp_path, "byte_level")
    library = library_tokenizer("byte_level")
    file = json.loads(library.to_str())
    file["truncation"] = {
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(file), "utf-8")
    text = "a longer text than three tokens"
    assert Tokenizer.load(tmp_path).encode(text) == library.encode(text).ids


def test_a_missing_tokenizer_names_the_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", '{"model": 3}', "\udcff"])
def test_a_damaged_tokenizer_names_the_file(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"chat_template": 3}'])
def test_a_damaged_config_names_the_file(tmp_path, content):
    write_folder(tmp_path, "byte_level")
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)


def test_a_broken_template_names_the_file(tmp_path):
    write_folder(tmp_path, "byte_level")
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"402": {"content": "<|im_start|>"}}}),
        ("tokenizer_config.json", {"additional_special_tokens": ["<|turn|>", "<|im_start|>"]}),
        ("tokenizer_config.json", {"extra_special_tokens": {"image_token": "<|im_start|>"}}),
        ("added_tokens.json", {"<|im_start|>": 402}),
    ],
)
def test_a_token_that_only_the_files_beside_it_name_is_refused(tmp_path, file, content):
    write_folder(tmp_path, "byte_level")
    (tmp_path / file).write_text(json.dumps(content))
    assert len(AutoTokenizer.from_pretrained(tmp_path).encode("<|im_start|>")) == 1
    with pytest.raises(CheckpointError, match=r"tokenizer\.json lacks the token '<\|im_start\|>'"):
        Tokenizer.load(tmp_path)
    AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)  # the remedy
    assert len(Tokenizer.load(tmp_path).encode("<|im_start|>")) == 1


def test_tokens_that_both_files_name_are_fine(tmp_path):
    write_folder(
        tmp_path,
        "byte_level",
        added_tokens_decoder={"0": {"content": "<|end|>"}},
        additional_special_tokens=[{"content": "<|turn|>"}],
    )
    assert Tokenizer.load(tmp_path).encode("<|turn|>") == [1]


def test_without_a_config_there_is_neither_eos_nor_chat(tmp_path):
    write_folder(tmp_path, "byte_level")
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_id is None
    with pytest.raises(BadRequest, match="no chat template") as caught:
        tokenizer.render_chat([{"role": "user", "content": "hello"}])
    assert caught.value.param == "messages"


def test_other_threads_run_while_a_long_text_is_tokenised():
    """The library's call for one text would stop them all: a worker's heartbeats, too."""
    tokenizer = make_tokenizer("byte_level")
    is_done = threading.Event()
    turns = 0

    def take_turns():
        nonlocal turns
        while not is_done.wait(0.0001):
            turns += 1

    other = threading.Thread(target=take_turns)
    other.start()
    before = turns
    tokenizer.encode("the quick brown fox " * 25_000)
    during = turns - before
    is_done.set()
    other.join()
    assert during >= 20


@kinds
def test_no_token_has_more_bytes_than_the_longest(kind):
    tokenizer = make_tokenizer(kind)
    for text in (*TEXTS, "the dog " * 50, "<tool>" * 40):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(text.encode()) <= len(ids) * tokenizer.token_bytes_max

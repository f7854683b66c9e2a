"""From a leg's fields to a request."""

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing
from worker_kit import prefill_leg

from neuron_di.errors import BadRequest, NeuronDiError, RemoteProtocolError, TooLarge
from neuron_di.request import Request, Tokenizer
from neuron_di.testing import write_random_checkpoint
from neuron_di.testing.checkpoints import TOOL_CHAT_TEMPLATE
from neuron_di.wire import JSON_NULL, PrefillLeg, PromptOptions, encode_json, prefill_leg_decoder
from neuron_di.wire.legs import REPORTED_LOGPROBS_MAX
from neuron_di.worker.prompts import BRACKETS_MAX, LONG_BYTES, PromptReader

CONTEXT = 3000
ASK = {"role": "user", "content": "hi there"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> PromptReader:
    folder: Path = tmp_path_factory.mktemp("prompts")
    write_random_checkpoint(folder, "llama", chat_template=TOOL_CHAT_TEMPLATE)
    tokenizer = Tokenizer.load(folder)
    return PromptReader(tokenizer, num_vocab=tokenizer.num_vocab, context_tokens=CONTEXT)


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


def leg_of(
    prompt: object, endpoint: str = "completions", emitted: tuple[int, ...] = (), **options: object
) -> PrefillLeg:
    """As it comes out of the wire."""
    leg = prefill_leg("r", prompt, emitted=emitted, max_tokens=8)
    leg = msgspec.structs.replace(leg, endpoint=endpoint, options=PromptOptions(**options))
    return prefill_leg_decoder.decode(encode_json(leg))


def read(reader: PromptReader, leg: PrefillLeg) -> Request:
    return asyncio.run(reader.read(leg))


def text_of(reader: PromptReader, leg: PrefillLeg) -> str:
    return reader.tokenizer.decode(read(reader, leg).prompt_ids, skip_special_tokens=False)


def refusal(reader: PromptReader, leg: PrefillLeg) -> NeuronDiError:
    with pytest.raises((BadRequest, TooLarge)) as caught:
        read(reader, leg)
    return caught.value


def test_a_chat_gets_all_that_its_template_takes(reader: PromptReader) -> None:
    leg = leg_of(
        [ASK],
        "chat",
        tools=raw([TOOL]),
        template_kwargs=raw({"enable_thinking": True}),
    )
    text = text_of(reader, leg)
    assert json.dumps(TOOL) in text
    assert text.endswith("<|im_start|>assistant\n<think>\n")
    assert text_of(reader, leg_of([ASK], "chat")) == (
        "<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_reads_no_effort_refuses_it(reader: PromptReader) -> None:
    asked = leg_of([ASK], "chat", reasoning_effort="low")
    assert refusal(reader, asked).param == "reasoning_effort"


def test_tools_that_may_not_be_called_are_not_shown(reader: PromptReader) -> None:
    hidden = leg_of([ASK], "chat", tools=raw([TOOL]), hides_tools=True)
    assert text_of(reader, hidden) == text_of(reader, leg_of([ASK], "chat"))


def test_a_template_without_tools_refuses_them_whether_shown_or_not(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "llama")
    tokenizer = Tokenizer.load(tmp_path)
    reader = PromptReader(tokenizer, num_vocab=tokenizer.num_vocab, context_tokens=CONTEXT)
    for hides in (False, True):
        leg = leg_of([ASK], "chat", tools=raw([TOOL]), hides_tools=hides)
        assert refusal(reader, leg).param == "tools"
    assert read(reader, leg_of([ASK], "chat", hides_tools=True)).prompt_ids


@pytest.mark.parametrize("content", ["<think>a ", [{"type": "text", "text": "<think>a "}], None])
def test_an_answer_may_go_on_with_a_message(reader: PromptReader, content: object) -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    leg = leg_of([ASK, {"role": "assistant", "content": content}], "chat", **options)
    end = "<|im_end|>\n<|im_start|>assistant\n" + ("<think>a " if content else "")
    assert text_of(reader, leg).endswith(end)
    assert read(reader, leg).begins_in_reasoning is bool(content)


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [(None, False), ({"enable_thinking": True}, True), ({"enable_thinking": False}, False)],
)
def test_whether_the_answer_begins_in_reasoning(
    reader: PromptReader, kwargs: object, expected: bool
) -> None:
    leg = leg_of([ASK], "chat", template_kwargs=raw(kwargs))
    assert read(reader, leg).begins_in_reasoning is expected
    assert not read(reader, leg_of("<think>")).begins_in_reasoning, "a plain text has no template"


def test_special_tokens_are_added_as_asked(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "llama")
    file = tmp_path / "tokenizer.json"
    fields = json.loads(file.read_text())
    fields["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, _A],
        "pair": [_A, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
        },
    }
    file.write_text(json.dumps(fields))
    tokenizer = Tokenizer.load(tmp_path)
    reader = PromptReader(tokenizer, num_vocab=tokenizer.num_vocab, context_tokens=CONTEXT)
    for endpoint, prompt, default in (("completions", "hi", True), ("chat", [ASK], False)):
        ids = {
            wish: read(reader, leg_of(prompt, endpoint, add_special_tokens=wish)).prompt_ids
            for wish in (None, True, False)
        }
        assert ids[True] == [1, *ids[False]]
        assert ids[None] == ids[default]


_A = {"Sequence": {"id": "A", "type_id": 0}}


def test_of_a_long_prompt_the_last_tokens_are_kept(reader: PromptReader) -> None:
    ids = list(range(100, 200))
    assert read(reader, leg_of(ids, keep_last_tokens=30)).prompt_ids == ids[-30:]
    assert read(reader, leg_of(ids, keep_last_tokens=100)).prompt_ids == ids
    assert read(reader, leg_of(ids, keep_last_tokens=101)).prompt_ids == ids
    long = ids * 40
    assert read(reader, leg_of(long, keep_last_tokens=50)).prompt_ids == long[-50:]
    assert "maximum context length" in refusal(reader, leg_of(long)).message
    chat = leg_of([ASK | {"content": "hi " * CONTEXT}], "chat")
    for leg, param in ((leg_of(long), "prompt"), (chat, "messages")):
        error = refusal(reader, leg)
        assert (error.code, error.param) == ("context_length_exceeded", param)
    text = "one two three four"
    kept = read(reader, leg_of(text, keep_last_tokens=2, report=True))
    whole = reader.tokenizer.encode(text)
    assert kept.prompt_ids == whole[-2:]
    assert kept.prompt_wish is not None
    assert text.endswith(kept.prompt_wish.text)
    assert len(kept.prompt_wish.text) < len(text)


@pytest.fixture
def encoded(reader: PromptReader, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """(characters, thread) of each text that is tokenised from now on."""
    texts: list[tuple[int, str]] = []
    encode = reader.tokenizer.encode

    def watch(text: str, **options: Any) -> list[int]:
        texts.append((len(text), threading.current_thread().name))
        return encode(text, **options)

    monkeypatch.setattr(reader.tokenizer, "encode", watch)
    return texts


def test_what_cannot_fit_the_context_is_not_tokenised(
    reader: PromptReader, encoded: list[tuple[int, str]]
) -> None:
    num_bytes = reader.text_bytes_max
    assert num_bytes >= CONTEXT
    fits, wide, long = "a" * num_bytes, "é" * (num_bytes // 2 + 1), "a" * (num_bytes + 1)
    for endpoint, param in (("completions", "prompt"), ("chat", "messages")):
        for text in (wide, long):
            prompt = text if endpoint == "completions" else [{**ASK, "content": text}]
            error = refusal(reader, leg_of(prompt, endpoint))
            assert (error.code, error.param) == ("context_length_exceeded", param)
            assert f"{num_bytes} bytes" in error.message
            with pytest.raises(BadRequest):
                reader.read_prompt(endpoint, raw(prompt), PromptOptions())
    assert encoded == []
    assert "maximum context length" in refusal(reader, leg_of(fits)).message
    assert [length for length, _ in encoded] == [num_bytes]


def test_of_a_text_that_is_cut_only_the_end_is_tokenised(
    reader: PromptReader, encoded: list[tuple[int, str]]
) -> None:
    text = "".join(f" {n} of many words" for n in range(reader.text_bytes_max // 10))
    kept = read(reader, leg_of(text, keep_last_tokens=CONTEXT - 8)).prompt_ids
    assert [length for length, _ in encoded] == [reader.text_bytes_max]
    assert kept == reader.tokenizer.encode(text)[-(CONTEXT - 8) :]


def test_ids_that_cannot_fit_are_not_looked_at(reader: PromptReader) -> None:
    assert "maximum context length" in refusal(reader, leg_of([-1] * (CONTEXT + 1))).message
    ids = [-1, *range(100, 100 + 2), *[7] * (CONTEXT - 2)]
    assert read(reader, leg_of(ids, keep_last_tokens=9)).prompt_ids == [7] * 9


def test_long_prompts_are_read_on_one_thread_and_short_ones_do_not_wait(
    reader: PromptReader, encoded: list[tuple[int, str]]
) -> None:
    wide = PromptReader(reader.tokenizer, num_vocab=reader.num_vocab, context_tokens=1 << 20)
    long = "a " * (LONG_BYTES // 2)

    async def read_all() -> None:
        await asyncio.gather(*(wide.read(leg_of(text)) for text in (long, "b", long)))

    asyncio.run(read_all())
    threads = dict(encoded)
    assert len({name for length, name in encoded if length == len(long)}) == 1
    assert threads[1] != threads[len(long)]


@pytest.mark.parametrize("keep", [0, -1, -2])
def test_none_or_fewer_tokens_are_not_kept(reader: PromptReader, keep: int) -> None:
    error = refusal(reader, leg_of("x", keep_last_tokens=keep))
    assert error.param == "truncate_prompt_tokens"


def test_a_report_has_the_prompts_text(reader: PromptReader) -> None:
    assert read(reader, leg_of("x")).prompt_wish is None
    of_text = read(reader, leg_of("héllo", report=True)).prompt_wish
    assert of_text is not None
    assert (of_text.text, of_text.num_top) == ("héllo", None)
    ids = reader.tokenizer.encode("héllo")
    of_ids = read(reader, leg_of([*ids, 1], report=True, logprobs=3)).prompt_wish
    assert of_ids is not None
    assert (of_ids.text, of_ids.num_top) == ("héllo<|im_start|>", 3)
    of_chat = read(reader, leg_of([ASK], "chat", report=True)).prompt_wish
    assert of_chat is not None
    assert of_chat.text.startswith("<|im_start|>user\nhi there")


def test_a_continuation_reports_nothing(reader: PromptReader) -> None:
    leg = leg_of("x", emitted=(5,), report=True, logprobs=20)
    assert read(reader, leg).prompt_wish is None


@pytest.mark.parametrize("outside", [-1, 1 << 40])
def test_what_was_emitted_is_no_client_s_fault(reader: PromptReader, outside: int) -> None:
    """Another worker said it, and is at fault."""
    with pytest.raises(RemoteProtocolError):
        read(reader, leg_of("x", emitted=(5, outside)))


def test_logprobs_of_a_prompt_are_bounded(reader: PromptReader) -> None:
    num_top = 20
    wide = PromptReader(reader.tokenizer, num_vocab=reader.num_vocab, context_tokens=1 << 20)
    limit = REPORTED_LOGPROBS_MAX // (num_top + 1)
    assert read(wide, leg_of([5] * limit, report=True, logprobs=num_top)).num_prompt == limit
    error = refusal(wide, leg_of([5] * (limit + 1), report=True, logprobs=num_top))
    assert error.param == "prompt_logprobs"
    echoed = leg_of([5] * (limit + 1), report=True, logprobs=num_top, logprobs_param="logprobs")
    assert refusal(wide, echoed).param == "logprobs"
    assert str(REPORTED_LOGPROBS_MAX) in error.message
    for wrong in (-1, 21):
        error = refusal(wide, leg_of("x", report=True, logprobs=wrong))
        assert error.param == "prompt_logprobs"
    assert read(wide, leg_of([5] * (limit + 1), report=True)).num_prompt == limit + 1


@pytest.mark.parametrize(
    "messages",
    [
        b'[{"role": "system", "role": "user", "content": "hi"}]',
        b'[{"role": "user", "content": [{"type": "text", "text": "a", "text": "b"}]}]',
    ],
)
def test_a_message_has_each_name_once(reader: PromptReader, messages: bytes) -> None:
    leg = leg_of([ASK], "chat")
    error = refusal(reader, msgspec.structs.replace(leg, prompt=msgspec.Raw(messages)))
    assert (error.param, error.message) == ("messages", "an object in messages has a name twice")


@pytest.mark.parametrize("name", ["tools", "documents", "template_kwargs"])
def test_so_has_whatever_else_a_template_is_given(reader: PromptReader, name: str) -> None:
    given = msgspec.Raw(b'[{"a": 1, "b": {"c": 1, "c": 2}}]')
    error = refusal(reader, leg_of([ASK], "chat", **{name: given}))
    assert error.message.endswith("has a name twice")


def test_what_would_take_long_to_read_is_refused_unread(
    reader: PromptReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read with the interpreter's lock, and meanwhile the worker would do nothing else."""
    many = b"[" + b"[]," * BRACKETS_MAX + b"[]]"
    leg = leg_of([ASK], "chat")
    monkeypatch.setattr(msgspec.json, "decode", None)
    for given in (many, many.replace(b"[]", b"{}")):
        error = refusal(reader, msgspec.structs.replace(leg, prompt=msgspec.Raw(given)))
        assert error.message == f"messages has more than {BRACKETS_MAX} brackets"


def test_brackets_of_a_text_are_text(reader: PromptReader) -> None:
    text = "[" * (BRACKETS_MAX + 1)
    assert "longer than" in refusal(reader, leg_of(text)).message


@pytest.mark.parametrize(
    ("endpoint", "prompt", "options", "param"),
    [
        ("chat", "hello", {}, "messages"),
        ("chat", [ASK], {"tools": raw({})}, "tools"),
        ("chat", [ASK], {"documents": raw([{"text": "x"}])}, "documents"),
        ("chat", [ASK], {"template_kwargs": raw([])}, "chat_template_kwargs"),
        ("chat", [ASK], {"template_kwargs": raw({"messages": 1})}, "chat_template_kwargs"),
        ("chat", [ASK], {"continue_final_message": True}, "continue_final_message"),
        ("completions", {"a": 1}, {}, "prompt"),
        ("completions", [5, "x"], {}, "prompt"),
        ("completions", [True], {}, "prompt"),
        ("completions", [2048], {}, "prompt"),
        ("completions", [-1], {}, "prompt"),
    ],
)
def test_what_is_wrong_is_named(
    reader: PromptReader, endpoint: str, prompt: object, options: dict[str, object], param: str
) -> None:
    assert refusal(reader, leg_of(prompt, endpoint, **options)).param == param


@pytest.mark.parametrize(
    ("endpoint", "prompt", "param"),
    [
        ("completions", "hi <pad> there", "prompt"),
        ("chat", [{"role": "user", "content": "hi <pad> there"}], "messages"),
    ],
)
def test_a_token_that_the_model_has_not_is_the_clients_and_named(
    tmp_path: Path, endpoint: str, prompt: object, param: str
) -> None:
    """As fine-tuned models have them: the tokenizer got one more, and the embedding did not."""
    write_random_checkpoint(tmp_path, "llama", chat_template=TOOL_CHAT_TEMPLATE)
    path = tmp_path / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    num_vocab = backend.get_vocab_size()
    backend.add_special_tokens(["<pad>"])
    backend.save(str(path))
    tokenizer = Tokenizer.load(tmp_path)
    reader = PromptReader(tokenizer, num_vocab=num_vocab, context_tokens=CONTEXT)
    refused = refusal(reader, leg_of(prompt, endpoint))
    assert (refused.param, refused.http_status) == (param, 400)
    assert f"token {num_vocab}" in refused.message
    other = json.loads(json.dumps(prompt).replace("<pad>", "pad"))
    assert max(read(reader, leg_of(other, endpoint)).prompt_ids) < num_vocab


def test_a_prompt_that_is_cut_keeps_the_token_that_leads_every_prompt(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "llama", chat_template=TOOL_CHAT_TEMPLATE)
    path = tmp_path / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 7)])
    backend.save(str(path))
    tokenizer = Tokenizer.load(tmp_path)
    reader = PromptReader(tokenizer, num_vocab=tokenizer.num_vocab, context_tokens=CONTEXT)
    text = "one two three four"
    first, *words = read(reader, leg_of(text)).prompt_ids
    assert first == 7
    assert read(reader, leg_of(text, keep_last_tokens=3)).prompt_ids == [7, *words[-2:]]
    assert read(reader, leg_of(text, keep_last_tokens=1)).prompt_ids == words[-1:]
    bare = leg_of(text, keep_last_tokens=3, add_special_tokens=False)
    assert read(reader, bare).prompt_ids == words[-3:]
    assert read(reader, leg_of([7, *words], keep_last_tokens=3)).prompt_ids == words[-3:]


def test_fields_that_are_not_there_take_no_bytes() -> None:
    assert encode_json(PromptOptions()) == b"{}"
    assert encode_json(PromptOptions(tools=JSON_NULL)) == b"{}"
    with_tools = encode_json(PromptOptions(tools=raw([TOOL])))
    again = msgspec.json.decode(with_tools, type=PromptOptions)
    assert bytes(again.tools) == bytes(raw([TOOL]))


def test_a_later_attempt_says_the_time_at_which_its_request_came(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "llama", chat_template="{{ strftime_now('%Y') }}")
    tokenizer = Tokenizer.load(tmp_path)
    reader = PromptReader(tokenizer, num_vocab=tokenizer.num_vocab, context_tokens=CONTEXT)
    year = text_of(reader, leg := leg_of([{"role": "user", "content": "a"}], "chat"))
    with pytest.MonkeyPatch.context() as patch:
        later_s = time.time() + 40_000_000
        patch.setattr("neuron_di.worker.prompts.unix_s", lambda: later_s)
        assert text_of(reader, leg) != year
        again = msgspec.structs.replace(leg, attempt=1, waited_s=40_000_000.0)
        assert text_of(reader, again) == year

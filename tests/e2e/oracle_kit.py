"""Hugging Face as the judge: its tokenizer, its chat template, its greedy `generate`."""

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# Block and chunk edges are where an off-by-one would be.
EDGE_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 511, 512, 513, 1023, 1025, 1999, 2000)
NUM_PROMPTS = 50
_TIE_MARGIN = 1e-4  # of the two best logits: float32 rounding may decide


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """One prompt in every form: its ids, its text, and the chat it is the rendering of, if any."""

    ids: list[int]
    text: str
    messages: list[dict[str, str]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Greedy:
    """What `generate` gave. `is_tie[i]`: rounding may well choose another token i."""

    ids: list[int]
    labels: list[str]
    text: str
    is_tie: list[bool]
    logprobs_0: torch.Tensor  # of every token of the vocabulary, at the first step


class Oracle:
    """One checkpoint. Holds it in float32."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._byte_of_char = {char: byte for byte, char in _byte_level_alphabet().items()}

    @property
    def num_vocab(self) -> int:
        return int(self._model.config.vocab_size)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def greedy(self, prompt_ids: list[int], num_tokens: int) -> Greedy:
        """Exactly `num_tokens` tokens, whatever they are."""
        ids = torch.tensor([prompt_ids])
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        generated = out.sequences[0, len(prompt_ids) :].tolist()
        best_two = [logits[0].topk(2).values for logits in out.logits]
        return Greedy(
            ids=generated,
            labels=[self.label(token_id) for token_id in generated],
            text=self._tokenizer.decode(generated, skip_special_tokens=True),
            is_tie=[bool(best - second < _TIE_MARGIN) for best, second in best_two],
            logprobs_0=torch.log_softmax(out.logits[0][0], dim=-1),
        )

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if token_id in self._tokenizer.all_special_ids or piece.startswith("<|"):
            return str(piece).encode()
        return bytes(self._byte_of_char[char] for char in piece)

    def label(self, token_id: int) -> str:
        """The token as the API shows it."""
        return self.token_bytes(token_id).decode("utf-8", "backslashreplace")

    def prompts(self, seed: int) -> list[TextPrompt]:
        """Prompts of 1 to 2,000 tokens: the edges, and lengths drawn so that few are long."""
        draw = random.Random(seed)
        lengths = [*EDGE_LENGTHS]
        while len(lengths) < NUM_PROMPTS:
            lengths.append(round(10 ** draw.uniform(0.5, 3.0)))
        return [self._prompt(length, draw) for length in lengths]

    def _prompt(self, num_tokens: int, draw: random.Random) -> TextPrompt:
        as_chat = [{"role": "user", "content": ""}]
        is_chat = num_tokens >= len(self._chat_ids(as_chat)) + 2
        room = num_tokens - (len(self._chat_ids(as_chat)) if is_chat else 0)
        words: list[str] = []
        while room > 0:
            word = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(1, 8)))
            # Words are split before they are encoded, so their tokens add up.
            cost = len(self.encode(" " + word))
            if cost <= room:
                words.append(" " + word)
                room -= cost
        text = "".join(words)
        messages = [{"role": "user", "content": text}] if is_chat else None
        ids = self.encode(text) if messages is None else self._chat_ids(messages)
        assert len(ids) == num_tokens
        if messages is not None:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        assert self.encode(text) == ids
        return TextPrompt(ids=ids, text=text, messages=messages)

    def _chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        ids: list[int] = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        return ids


def _byte_level_alphabet() -> dict[int, str]:
    """GPT-2's letter for each byte: itself where it can be seen, else one from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in seen}
    unseen = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(256 + index) for index, byte in enumerate(unseen)}

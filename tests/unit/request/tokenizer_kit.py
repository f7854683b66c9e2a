"""Two small tokenizers of the kinds that models have: byte-level, and SentencePiece-like."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from neuron_di.request import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog and the dog does not mind at all",
    "hello world, this is a small text about nothing; stop strings end it. END",
    "naïve café, Ünïcödé, 你好世界, こんにちは, emoji 👩‍👩‍👧 and 🎉",
] * 4

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|turn|>' + m['role'] + '\\n' + m['content'] }}"
    "{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)


@cache
def byte_level_json() -> str:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<tool>", " spaced out "])  # added, and not special
    return str(backend.to_str())


@cache
def sentencepiece_json() -> str:
    """As Llama 2's: Metaspace pieces, byte fallback, one space dropped at the start."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=150, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    ascii_only = [text for text in CORPUS if text.isascii()]
    trained.train_from_iterator(ascii_only, trainer)
    # Byte tokens are ordinary tokens of the model, not added ones.
    file: dict[str, Any] = json.loads(trained.to_str())
    vocab = file["model"]["vocab"]
    vocab.update({f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)})
    vocab["▁▁▁"] = len(vocab)
    file["model"] |= {"byte_fallback": True, "fuse_unk": True}
    backend = tokenizers.Tokenizer.from_str(json.dumps(file))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    bos_id = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos_id)]
    )
    return str(backend.to_str())


TOKENIZER_JSON = {"byte_level": byte_level_json, "sentencepiece": sentencepiece_json}
KINDS = list(TOKENIZER_JSON)


@cache
def library_tokenizer(kind: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(TOKENIZER_JSON[kind]())


@cache
def make_tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(TOKENIZER_JSON[kind]()))


def write_folder(folder: Path, kind: str, **config: Any) -> Path:
    """A model folder's tokenizer files; `config` overrides tokenizer_config.json, None drops."""
    bos, eos = ("<|turn|>", "<|end|>") if kind == "byte_level" else ("<s>", "</s>")
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": bos, "special": True, "__type": "AddedToken"},
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        **config,
    }
    kept = {key: value for key, value in fields.items() if value is not None}
    (folder / "tokenizer.json").write_text(TOKENIZER_JSON[kind](), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(kept), "utf-8")
    return folder

"""Chats in which somebody asks for a tale and gets it, and plain tales without a chat.

Next: examples/models/train_tiny_tales.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random
from typing import Literal, TypedDict

from tales_corpus import Tale, capitalized, read_sections, tell_more, tell_tale, with_article

UNKNOWN_SHARE = 0.12  # of the words that a request names are none that tales know
_ONSETS, _CODAS = (
    sounds.split(" ")
    for sounds in (
        "b br c ch cl d dr f fl g gr h j k l m n p pl qu r s sh st t tr v w z",
        "b ck d ft g l ll m n nd nk p r rt s st t x" + 9 * " ",  # a third of them are silent
    )
)


class Message(TypedDict):
    """One turn of a chat, as the chat template takes it."""

    role: Literal["system", "user", "assistant"]
    content: str


Document = str | list[Message]  # a plain tale, or a chat

_LISTS = {title: body.splitlines() for title, body in read_sections("tales_requests.txt").items()}


def _answered(title: str) -> list[tuple[list[str], str]]:
    """Return (questions, their answer) pairs of a section with Q and A lines."""
    pairs: list[tuple[list[str], str]] = []
    questions: list[str] = []
    for line in _LISTS[title]:
        kind, text = line.split(" ", 1)
        if kind == "Q":
            questions.append(text)
        else:
            pairs.append((questions, text))
            questions = []
    return pairs


_THANKS = _answered("thanks")[0]
_SMALL_TALK = [*_answered("about itself"), _THANKS, *_answered("goodbyes")]
_QUESTIONS = _answered("questions")


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _unknown_word(rng: Random) -> str:
    """Return a word that no tale has: a real one, or one such as `brumplet`."""
    if rng.random() < 0.5:
        return rng.choice(_LISTS["unknown words"])
    syllables = [rng.choice(_ONSETS) + rng.choice("aeiou") + rng.choice(_CODAS) for _ in range(3)]
    return "".join(syllables[: rng.choice((1, 2, 2, 2, 3))])


def _asked_tale(rng: Random) -> tuple[str, str, Tale]:
    """Return (request, answer, its tale); the request names things of the tale in many ways.

    If it names a word that tales do not know, the answer says so and keeps to the rest.
    """
    tale = tell_tale(rng)
    if rng.random() < 0.1:
        return rng.choice(_LISTS["open asks"]), tale.text, tale
    subject = rng.choice(_LISTS["subjects"])
    named = dict(tale.cast)
    for slot in ("N", "F", "hero", "friend", "thing"):
        if f"{{{slot}}}" in subject and rng.random() < UNKNOWN_SHARE:
            word = _unknown_word(rng)
            named[slot] = capitalized(word) if slot in ("N", "F") else word
    subject = re.sub(r"\ba \{(\w+)\}", lambda noun: with_article(named[noun[1]]), subject)
    request = rng.choice(_LISTS["asks"]).replace("*", subject.format_map(named))
    if rng.random() < 0.08:
        request += f" {rng.choice(_LISTS['extras'])}"
    if rng.random() < 0.1:
        request = request.lower()
    answer = tale.text if named == tale.cast else f"{_LISTS['unknown'][0]}\n\n{tale.text}"
    return request, answer, tale


def _other_request(rng: Random) -> str:
    """Return a request that the model can't serve."""
    unknown = rng.random() < UNKNOWN_SHARE
    topic = _unknown_word(rng) if unknown else rng.choice(_LISTS["other topics"])
    return rng.choice(_LISTS["other asks"]).replace("*", topic)


def _small_talk(rng: Random, questions: list[str], answer: str) -> list[Message]:
    return [_user(rng.choice(questions)), _assistant(answer)]


def _follow_up(rng: Random, tale: Tale) -> list[Message]:
    """Go on after a tale: with more of it, with a question about it, or with the next one."""
    choice = rng.random()
    if choice < 0.45:
        return [_user(rng.choice(_LISTS["continue"])), _assistant(tell_more(rng, tale))]
    if choice < 0.75:
        questions, answer = rng.choice(_QUESTIONS)
        question = questions[0].format_map(tale.cast)
        return [_user(question), _assistant(answer.format_map(tale.cast))]
    if choice < 0.85:
        return _small_talk(rng, *_THANKS)
    if rng.random() < 0.5:
        return [_user(rng.choice(_LISTS["another"])), _assistant(tell_tale(rng).text)]
    request, answer, _ = _asked_tale(rng)
    return [_user(request), _assistant(answer)]


def chat(rng: Random) -> list[Message]:
    """Make up one chat of one or two exchanges."""
    request, answer, tale = _asked_tale(rng)
    messages: list[Message] = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": rng.choice(_LISTS["systems"])})
    choice = rng.random()
    if choice < 0.06:
        messages += _small_talk(rng, *rng.choice(_SMALL_TALK))
        if rng.random() < 0.5:
            messages += [_user(request), _assistant(answer)]
        return messages
    if choice < 0.12:
        excuse = rng.choice(_LISTS["excuses"])
        return [*messages, _user(_other_request(rng)), _assistant(f"{excuse}\n\n{tale.text}")]
    messages += [_user(request), _assistant(answer)]
    if rng.random() < 0.25:
        messages += _follow_up(rng, tale)
    return messages


def plain_tale(rng: Random) -> str:
    """Tell a tale without a chat: bare, or after a title or a request, or without its beginning."""
    choice = rng.random()
    if choice < 0.2:
        request, _, tale = _asked_tale(rng)
        return f"{request}\n\n{tale.text}"
    tale = tell_tale(rng)
    if choice < 0.35:
        title = f"The {capitalized(tale.cast['hero'])} and the {capitalized(tale.cast['thing'])}"
        return f"{title}\n\n{tale.text}"
    if choice < 0.5:
        starts = [match.end() for match in re.finditer(r"[.?!]\"? (?=[A-Z])", tale.text)]
        return tale.text[rng.choice(starts[: len(starts) // 2]) :]
    return tale.text


def documents(seed: int) -> Iterator[Document]:
    """Yield chats and plain tales, three to one, without end."""
    rng = Random(seed)
    while True:
        yield chat(rng) if rng.random() < 0.75 else plain_tale(rng)

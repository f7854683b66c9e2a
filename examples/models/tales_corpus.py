"""An endless, seeded supply of short tales.

A tale is a plot from `tales_plots.txt`, filled with a cast from `tales_words.txt`. The same seed
always gives the same tales, on every machine: only `random.Random` decides.

Next: examples/models/tales_chats.py
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from random import Random

BEATS_PER_PARAGRAPH = 2

_PRONOUNS = {
    "he": {"he": "he", "him": "him", "his": "his", "himself": "himself"},
    "she": {"he": "she", "him": "her", "his": "her", "himself": "herself"},
}
_NEVER_YOUNG = {"grandmother", "grandfather", "giant", "wizard"}
_NEVER_OLD = {"boy", "girl", "child", "kitten", "puppy", "prince", "princess"}
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_MACRO = re.compile(r"<(\w+)>")

Beats = tuple[tuple[str, ...], ...]  # for each beat, its alternatives


@dataclass(frozen=True, slots=True)
class Plot:
    """A row of beats; `groups` are the kinds of thing it can be told about."""

    beats: Beats
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tale:
    """A finished text, and what was put into the slots of its plot."""

    text: str
    cast: dict[str, str]


def read_sections(file_name: str) -> dict[str, str]:
    """Return {title: body} of a file next to this one; `== title` starts one, `#` a comment."""
    text = (Path(__file__).parent / file_name).read_text("utf-8")
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    sections = (section.split("\n", 1) for section in text.split("\n== ")[1:])
    return {title: body.strip() for title, body in sections}


def with_article(noun: str) -> str:
    """Return the noun with `a` or `an` before it."""
    return ("an " if noun[0].lower() in "aeiou" and not noun.startswith("un") else "a ") + noun


def capitalized(text: str) -> str:
    """Return the text with its first letter in upper case, the rest untouched."""
    return text[:1].upper() + text[1:]


def _entries(body: str) -> dict[str, list[str]]:
    """Read `key: first; second` lines into {key: [first, second]}."""
    rows = (line.split(":", 1) for line in body.splitlines())
    return {key: [part.strip() for part in rest.split(";")] for key, rest in rows}


_WORDS = read_sections("tales_words.txt")
_ANIMALS = _WORDS["animals"].split()
_PEOPLE = {kind: pronouns[0] for kind, pronouns in _entries(_WORDS["people"]).items()}
_NAMES = {pronoun: _WORDS[f"names {pronoun}"].split() for pronoun in _PRONOUNS}
_TRAITS, _PLACES, _WEATHER = (_entries(_WORDS[key]) for key in ("traits", "places", "weather"))
_THINGS = {
    title.removeprefix("things "): _entries(body)
    for title, body in _WORDS.items()
    if title.startswith("things ")
}


def _beats(body: str) -> Beats:
    return tuple(tuple(beat.splitlines()) for beat in body.split("\n\n"))


def _plot(groups: str, body: str) -> Plot:
    return Plot(_beats(body), tuple(_THINGS) if groups == "any" else tuple(groups.split()))


_PLOT_SECTIONS = [
    (*title.split(" ", 1), body) for title, body in read_sections("tales_plots.txt").items()
]
_MACROS = {name: body.splitlines() for kind, name, body in _PLOT_SECTIONS if kind == "macro"}
_PLOTS = [_plot(name.split(": ")[1], body) for kind, name, body in _PLOT_SECTIONS if kind == "plot"]
_EPILOGUES = [_beats(body) for kind, _, body in _PLOT_SECTIONS if kind == "epilogue"]


def _figure(rng: Random, pronoun: str, taken: set[str]) -> tuple[str, str]:
    """Choose (kind, name) for someone who goes by `pronoun`; never a kind in `taken`."""
    people = [kind for kind, fixed in _PEOPLE.items() if fixed in ("", pronoun)]
    kind = rng.choice(rng.choice((_ANIMALS, _ANIMALS, people)))
    if kind in taken:
        return _figure(rng, pronoun, taken)
    return kind, rng.choice(_NAMES[pronoun])


def _trait(rng: Random, kind: str) -> str:
    trait = rng.choice(list(_TRAITS))
    young = trait in ("small", "little", "young")
    old = trait in ("old", "wise")
    if (young and kind in _NEVER_YOUNG) or (old and kind in _NEVER_OLD):
        return _trait(rng, kind)
    return trait


def _cast(rng: Random, groups: tuple[str, ...]) -> dict[str, str]:
    """Choose who, what, where and when for one tale; the thing comes from one of the groups."""
    pronoun, other = rng.choice((("he", "she"), ("she", "he")))  # so each pronoun means one figure
    hero, name = _figure(rng, pronoun, set())
    friend, friend_name = _figure(rng, other, {hero})
    third = rng.choice([kind for kind in _ANIMALS if kind not in (hero, friend)])
    things = _THINGS[rng.choice(groups)]
    thing = rng.choice(list(things))
    look = rng.choice(things[thing])
    in_place = rng.choice(list(_PLACES))
    sight_1, sight_2, spot, spot2 = _PLACES[in_place]
    trait, friend_trait = _trait(rng, hero), _trait(rng, friend)
    day = rng.choice(list(_WEATHER))
    he, she = _PRONOUNS[pronoun], _PRONOUNS[other]
    cast = he | {
        "N": name, "F": friend_name, "hero": hero, "friend": friend, "third": third,
        "she": she["he"], "her": she["him"], "hers": she["his"],
        "a_hero": with_article(f"{trait} {hero}"), "trait_word": trait,
        "a_friend": with_article(f"{friend_trait} {friend}"), "a_third": with_article(third),
        "thing": thing, "one_thing": with_article(thing),
        "a_thing": with_article(f"{look} {thing}"), "look": look,
        "in_place": in_place, "place": re.sub(r"^(in|by|on) (the|an?) ", "the ", in_place),
        "sight": rng.choice((sight_1, sight_2)), "spot": spot, "spot2": spot2,
        "day": day, "weather": rng.choice(_WEATHER[day]),
    }  # fmt: skip
    cast |= {capitalized(slot): capitalized(cast[slot]) for slot in cast if slot[0].islower()}
    cast["trait"] = rng.choice(_TRAITS[trait]).format_map(cast)
    return cast


def _written(rng: Random, text: str, cast: dict[str, str]) -> str:
    """Replace macros and choices by what the generator picks, then fill in the cast."""
    while match := _MACRO.search(text):
        text = text[: match.start()] + rng.choice(_MACROS[match[1]]) + text[match.end() :]
    text = _CHOICE.sub(lambda choice: rng.choice(choice[1].split("|")), text)
    return text.format_map(cast)


def _tell(rng: Random, beats: Beats, cast: dict[str, str]) -> str:
    written = [_written(rng, rng.choice(beat), cast) for beat in beats]
    starts = range(0, len(written), BEATS_PER_PARAGRAPH)
    return "\n\n".join(" ".join(written[start : start + BEATS_PER_PARAGRAPH]) for start in starts)


def tell_tale(rng: Random) -> Tale:
    """Tell one tale of about 150 to 270 words."""
    plot = rng.choice(_PLOTS)
    cast = _cast(rng, plot.groups)
    return Tale(_tell(rng, plot.beats, cast), cast)


def tell_more(rng: Random, tale: Tale) -> str:
    """Tell what happened after the tale, to the same hero and friend."""
    return _tell(rng, rng.choice(_EPILOGUES), tale.cast)

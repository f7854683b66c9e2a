"""Text to train a test checkpoint's tokenizer on: the same on every machine and every Python.

Sentences, numbers, and lines of JSON and Python, of frequent English words and of made-up ones:
what people ask in tests has then about as many tokens as with a real tokenizer.
"""

from collections.abc import Iterator
from itertools import accumulate
from random import Random

_ENGLISH = """
the of and to a in is it that for on with as you are this be at or from have not an by we can which
all will one has their if do what time there more when up out about so no than into them how who
each other some would like my he your his her they been its were make may did get come made over
new only work part take know place year live back give most very after thing our just name good
sentence man think say great where help through much before line right too mean old any same tell
boy follow came want show also around form three small set put end does another well large must big
even such because turn here why ask went men read need land different home us move try kind hand
picture again change off play spell air away animal house point page letter mother answer found
study still learn should America world high every near add food between own below country plant last
school father keep tree never start city earth eye light thought head under story saw left few while
along might close something seem next hard open example begin life always those both paper together
got group often run important until children side feet car mile night walk white sea began grow took
river four carry state once book hear stop without second later miss idea enough eat face watch far
really almost let above girl sometimes mountain cut young talk soon list song being leave family
question model token cache layer memory number user server request write explain describe following
"""
_CODE = """
def return self import class None True False if else for in not and or while with try except raise
yield lambda print len range list dict int str bool float type name value key data path file text
index count size start stop result error args kwargs options config content role system assistant
string object array integer properties required items enum null true false function arguments
"""
_NAMES = (_CODE + _ENGLISH).split()
_ONSETS = ["", *"bcdfghjklmnprstvw", "br", "ch", "cl", "dr", "fl", "gr", "pl", "qu", "sh", "st"]
_NUCLEI = [*"aaeeiioouy", "ai", "ea", "ee", "io", "ou"]
_CODAS = ["", "", "", *"dlmnrstx", "ck", "ct", "ld", "nd", "ng", "nt", "rd", "ss", "st", "tion"]
_NUM_MADE_UP = 50_000
_LINES = (
    '{{"{0}": "{1}", "{2}": {3}}}\n',
    '{{"type": "{0}", "items": [{3}, {3}], "{1}": {{"{2}": true}}}}\n',
    "    {0} = {1}({2}, {3})\n",
    "def {0}_{1}({2}: int = {3}) -> None:\n",
    "        if {0} == {3}:\n            {1}.{2}()\n",
    "# {0} {1} {2}\n\n",
)


def corpus(num_chars: int) -> Iterator[str]:
    """Texts of so many characters in all, or a few more: those of fewer begin those of more."""
    random = Random(0)  # only its choices(), which are the same in all versions of Python
    words = _ENGLISH.split() + _made_up(random)
    # By rank, as in any language: the first word is twice as frequent as the second one.
    weights = list(accumulate(1 / rank for rank in range(1, len(words) + 1)))
    while num_chars > 0:
        sentences = "".join(_sentence(random, words, weights) for _ in range(8))
        text = sentences.strip() + "\n\n" + "".join(_line(random) for _ in range(3))
        yield text
        num_chars -= len(text)


def _made_up(random: Random) -> list[str]:
    parts = [random.choices(each, k=3 * _NUM_MADE_UP) for each in (_ONSETS, _NUCLEI, _CODAS)]
    syllables = map("".join, zip(*parts, strict=True))
    lengths = random.choices((1, 2, 2, 3), k=_NUM_MADE_UP)
    words = ("".join(next(syllables) for _ in range(length)) for length in lengths)
    return list(dict.fromkeys(words))


def _sentence(random: Random, words: list[str], weights: list[float]) -> str:
    (length,) = random.choices(range(4, 20))
    first, *rest = random.choices(words, cum_weights=weights, k=length)
    ends = random.choices((", ", " ", " ", " ", " ", " ", " ", " '", "; "), k=length - 1)
    middle = "".join(map("".join, zip(ends, rest, strict=True)))
    return first.capitalize() + middle + random.choices((". ", ".\n", "? ", ": "))[0]


def _line(random: Random) -> str:
    ((line,), names) = random.choices(_LINES), random.choices(_NAMES, k=3)
    digits = "".join(random.choices("0123456789", k=random.choices((1, 2, 3, 5))[0]))
    return line.format(*names, digits)

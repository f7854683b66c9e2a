"""What an endpoint is and takes, found out by asking, and the requests that are made for it."""

from dataclasses import dataclass, field

import msgspec

from neuron_di.bench.client import Heard, HttpClient
from neuron_di.bench.outcome import Expected, explain, read_outcome
from neuron_di.bench.plan import Plan
from neuron_di.bench.prompts import WORDS, Pieces, PromptMaker
from neuron_di.bench.settings import Settings
from neuron_di.errors import ConfigError

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
PROBE_TIMEOUT_S = 60.0
TOKENS_PER_WORD = 1.3  # where nothing can be counted
_PROBE_TOKENS = 2
_PROBE_WORDS = (20, 120)  # two prompts whose tokens say what a word has
_IDS_MIN = 16  # so few tokens make no prompts that differ
_REFUSING = (400, 404, 422, 501)  # statuses by which a field or a route is said to be unknown
_TRIES = (  # fields that are left out, in this order, until the endpoint takes the rest
    (),
    ("ignore_eos",),
    ("stream_options",),
    ("ignore_eos", "stream_options"),
)


@dataclass(slots=True, kw_only=True)
class Endpoint:
    """An endpoint that is ready for requests. `notes` are for the reader of its figures."""

    name: str
    url: str
    client: HttpClient
    model: str
    context_tokens: int | None
    pieces: Pieces
    options: dict[str, object]  # fields of every request
    path: str
    by_usage: bool  # tokens are counted by usage, otherwise by chunks
    is_exact: bool  # it was told not to end before the last token
    prompts_are_ids: bool
    notes: list[str] = field(default_factory=list)

    def expected(self, num_tokens: int) -> Expected:
        return Expected(num_tokens, self.is_exact)

    def request_bytes(self, prompt: bytes, num_tokens: int) -> bytes:
        """A request, ready to be sent."""
        return self.client.request(
            "POST", self.path, _body(self.path, self.options, prompt, num_tokens)
        )

    def maker(self, settings: Settings) -> PromptMaker:
        return PromptMaker(
            self.pieces,
            settings.seed,
            shared_tokens=settings.shared_prefix_tokens,
            block_tokens=settings.trace_block_tokens * settings.token_scale,
        )

    def nth_request(self, maker: PromptMaker, plan: Plan, index: int) -> bytes:
        """The bytes of request `index` of the plan."""
        prompt = maker.prompt(index, int(plan.input_tokens[index]), plan.hashes(index))
        return self.request_bytes(prompt, int(plan.output_tokens[index]))


def _body(path: str, options: dict[str, object], prompt: bytes, num_tokens: int) -> bytes:
    fields = options | {"max_tokens": num_tokens}
    if path == PATHS["chat"]:
        fields["messages"] = [{"role": "user", "content": msgspec.Raw(prompt)}]
    else:
        fields["prompt"] = msgspec.Raw(prompt)
    return msgspec.json.encode(fields)


async def find_endpoint(settings: Settings, place: int, key: str | None) -> Endpoint:
    """Ask the endpoint at `settings.urls[place]`. ConfigError when it cannot be measured."""
    client = HttpClient(settings.urls[place], key)
    try:
        probe = _Probe(settings, settings.urls[place], client, has_key=key is not None)
        return await probe.find(settings.names[place])
    except BaseException:
        await client.close()
        raise


class _Probe:
    """Finds out about one endpoint, step by step."""

    def __init__(self, settings: Settings, url: str, client: HttpClient, *, has_key: bool) -> None:
        self._settings = settings
        self._has_key = has_key
        self._url = url
        self._client = client
        self._path = PATHS[settings.api]
        self._notes: list[str] = []

    async def find(self, name: str) -> Endpoint:
        model, context_tokens = await self._find_model()
        options: dict[str, object] = {
            "model": model,
            "temperature": self._settings.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._settings.ignore_eos:
            options["ignore_eos"] = True
        ids = await self._find_ids(model) if self._settings.api == "completions" else []
        pieces = Pieces.of_ids(ids) if ids else Pieces.of_words(TOKENS_PER_WORD, 0.0)
        options, pieces, by_usage = await self._find_options(options, pieces)
        are_ids = pieces.opening == b"["
        if not are_ids:
            pieces = await self._count_words(options, by_usage=by_usage)
        if not by_usage:
            self._notes.append("it sends no usage: tokens are chunks, which may hold several each")
        return Endpoint(
            name=name,
            url=self._url,
            client=self._client,
            model=model,
            context_tokens=self._settings.context_tokens or context_tokens,
            pieces=pieces,
            options=options,
            path=self._path,
            by_usage=by_usage,
            is_exact="ignore_eos" in options,
            prompts_are_ids=are_ids,
            notes=self._notes,
        )

    async def _find_model(self) -> tuple[str, int | None]:
        """The model to ask for, and its context where the endpoint says it."""
        wanted = self._settings.model
        heard = await self._send(self._client.request("GET", "/v1/models"))
        try:
            entries = (
                msgspec.json.decode(heard.body, type=_Models).data if heard.status == 200 else []
            )
        except (msgspec.DecodeError, UnicodeDecodeError):
            entries = []
        by_name = {entry.id: entry for entry in entries}
        if wanted is None and len(by_name) == 1:
            (wanted,) = by_name
        if wanted is None:
            if not by_name:
                is_empty = heard.status == 200  # as of a proxy that knows no worker yet
                words = "wait until it serves one" if is_empty else "give the address up to /v1"
                raise ConfigError(
                    f"{self._url} lists no models ({explain(heard)}): {words}, or give the model's "
                    "name with --model"
                )
            raise ConfigError(
                f"{self._url} lists {len(by_name)} models: name one with --model, "
                f"of {', '.join(list(by_name)[:8])}"
            )
        entry = by_name.get(wanted)
        return wanted, entry.max_model_len if entry is not None else None

    async def _find_ids(self, model: str) -> list[int]:
        """Ids of some of the endpoint's own tokens; none where it does not tokenise."""
        body = {"model": model, "prompt": " ".join(WORDS), "add_special_tokens": False}
        request = self._client.request("POST", "/tokenize", msgspec.json.encode(body))
        heard = await self._send(request)
        try:
            tokens = (
                msgspec.json.decode(heard.body, type=_Tokens).tokens if heard.status == 200 else []
            )
        except (msgspec.DecodeError, UnicodeDecodeError):
            tokens = []
        # The first may be a special token that was added all the same.
        ids = sorted(set(tokens[1:]))
        return ids if len(ids) >= _IDS_MIN else []

    async def _find_options(
        self, options: dict[str, object], pieces: Pieces
    ) -> tuple[dict[str, object], Pieces, bool]:
        """The options that the endpoint takes, of what prompts may be, and whether it has usage."""
        made_of = [pieces]
        if pieces.opening == b"[":
            made_of.append(Pieces.of_words(TOKENS_PER_WORD, 0.0))
        refusal = ""
        for pieces_to_try in made_of:
            for without in _TRIES:
                if any(name not in options for name in without):
                    continue
                kept = {name: value for name, value in options.items() if name not in without}
                heard = await self._probe(kept, pieces_to_try, 8)
                if heard.status in _REFUSING:
                    refusal = refusal or explain(heard)
                    continue
                outcome = read_outcome(heard, Expected(_PROBE_TOKENS, is_exact=False))
                if outcome.ending != "ok":
                    raise ConfigError(f"{self._url} does not complete a prompt: {outcome.why}")
                self._notes += [f"it refuses {name}: sent without" for name in without]
                if "ignore_eos" in without:
                    self._notes.append("answers may be shorter than asked for")
                if pieces_to_try is not pieces:
                    self._notes.append("it refuses prompts of token ids: they are words")
                return kept, pieces_to_try, outcome.prompt_tokens > 0
        raise ConfigError(f"{self._url} does not complete a prompt: {refusal}")

    async def _count_words(self, options: dict[str, object], *, by_usage: bool) -> Pieces:
        """Words as pieces, with as many tokens as usage says that they have."""
        few, many = _PROBE_WORDS
        assumed = Pieces.of_words(TOKENS_PER_WORD, 0.0)
        if by_usage:
            counts = []
            for num in _PROBE_WORDS:
                heard = await self._probe(options, assumed, num)
                outcome = read_outcome(heard, Expected(_PROBE_TOKENS, is_exact=False))
                counts.append(outcome.prompt_tokens)
            per_word = (counts[1] - counts[0]) / (many - few)
            if counts[0] > 0 and per_word > 0:
                around = counts[0] - per_word * few
                self._notes.append(
                    f"prompts are words of {per_word:.2f} tokens each, and {around:.0f} around them"
                )
                return Pieces.of_words(per_word, around)
        self._notes.append(f"prompts are words; assumed: {TOKENS_PER_WORD} tokens each")
        return assumed

    async def _probe(self, options: dict[str, object], pieces: Pieces, num_pieces: int) -> Heard:
        maker = PromptMaker(pieces, self._settings.seed)
        num_tokens = round(num_pieces * pieces.tokens_per_piece)
        prompt = maker.warm_up(1_000_000 + num_pieces, num_tokens)
        body = _body(self._path, options, prompt, _PROBE_TOKENS)
        return await self._send(self._client.request("POST", self._path, body))

    async def _send(self, request: bytes) -> Heard:
        timeout_s = min(PROBE_TIMEOUT_S, self._settings.timeout_s)
        heard = await self._client.send(request, timeout_s)
        if heard.end in ("connection", "timeout"):
            raise ConfigError(f"{self._url} cannot be reached: {heard.why}")
        if heard.status in (401, 403):
            if self._has_key:
                raise ConfigError(f"{self._url} does not accept the key in KEY_NEURON_DI")
            raise ConfigError(f"{self._url} wants an API key, in the variable KEY_NEURON_DI")
        return heard


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokens(msgspec.Struct):
    tokens: list[int]

"""One question to one of several servers of the target: bounded concurrency, retries, and what came
back. vLLM and SGLang are sent token ids and return token ids; any other OpenAI-compatible server is
sent messages and returns a message.
"""

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from draftsmith.core import UserError

AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}
LONGEST_WAIT_S = 60.0


@dataclass(frozen=True)
class Question:
    """A prompt in both forms, and how to answer it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    prompt_ids: list[int]
    temperature: float
    seed: int


@dataclass(frozen=True)
class Reply:
    """What the target said: `ids` through its end token, or a `message`; and why it ended."""

    ids: list[int] | None
    message: dict[str, Any] | None
    stop_reason: Literal["eos", "length"]


@dataclass(frozen=True)
class Settings:
    """How every question is put."""

    max_new_tokens: int
    eos: list[int]
    template_kwargs: dict[str, Any]
    concurrency: int
    timeout_s: float
    retries: int
    model: str  # the name to ask for, where the server does not list one
    top_p: float = 1.0
    top_k: int = 0  # 0: all


class GivenUp(Exception):
    """A question that no server answered; the text says why."""


class _Again(Exception):
    """An answer may still come: ask again, after `after_s` if the server said so."""

    def __init__(self, reason: str, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.after_s = after_s


@dataclass
class Server:
    """A server as it was found."""

    url: str
    kind: Literal["vllm", "sglang", "chat"]
    model: str
    http: httpx.AsyncClient
    busy: int = 0
    failed_at: float = field(default=-1e9)


async def connect(url: str, settings: Settings) -> Server:
    """The server at `url`. Raises UserError when nothing OpenAI-compatible answers there."""
    url = url.rstrip("/").removesuffix("/v1")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=settings.concurrency)
    http = httpx.AsyncClient(base_url=url, timeout=settings.timeout_s, limits=limits)
    try:
        if (await http.get("/get_server_info", timeout=30)).status_code == 200:
            return Server(url, "sglang", "", http)
        models = await http.get("/v1/models", timeout=30)
        if models.status_code == 200:
            names = [entry["id"] for entry in models.json()["data"]] or [settings.model]
            model = settings.model if settings.model in names else names[0]
            version = await http.get("/version", timeout=30)
            kind = "vllm" if version.status_code == 200 and "version" in version.text else "chat"
            if kind == "chat" and settings.top_k:
                raise UserError(
                    where="regenerate.top_k",
                    found=f"{settings.top_k}, and {url}, a server of the plain OpenAI API",
                    expected="0: that API has no top_k",
                    remedy="Leave it out, or set it where the server is started.",
                )
            return Server(url, kind, model, http)
        found = f"a server that answers {models.status_code} to /v1/models"
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        found = f"nothing that answers ({type(error).__name__}: {error})"
    raise UserError(
        where=f"regenerate.servers: {url}",
        found=found,
        expected="a running OpenAI-compatible server of the target",
        remedy="Check address and port; or let regenerate.launch start one.",
    )


class Pool:
    """Servers of the same target; a question goes to the least busy one that did not just fail."""

    def __init__(self, servers: list[Server], settings: Settings) -> None:
        self.servers, self.settings = servers, settings
        self.asked = self.repeated = 0
        self._room = asyncio.Semaphore(settings.concurrency * len(servers))

    async def ask(self, question: Question) -> Reply:
        """The reply. Raises GivenUp when the retries are used up, or the question is refused."""
        async with self._room:
            for attempt in range(self.settings.retries + 1):
                server = self._choose()
                server.busy += 1
                self.asked += 1
                try:
                    return await _post(server, question, self.settings)
                except _Again as error:
                    server.failed_at = asyncio.get_running_loop().time()
                    if attempt == self.settings.retries:
                        raise GivenUp(f"{error} ({attempt + 1} times)") from None
                    self.repeated += 1
                    await asyncio.sleep(_pause(attempt, error.after_s))
                finally:
                    server.busy -= 1
        raise AssertionError("the loop returns or raises")

    def _choose(self) -> Server:
        now = asyncio.get_running_loop().time()
        return min(self.servers, key=lambda s: (now - s.failed_at < 5, s.busy))

    async def close(self) -> None:
        """Close the connections."""
        for server in self.servers:
            await server.http.aclose()


def _pause(attempt: int, after_s: float | None) -> float:
    """Seconds: what the server asked for, else 1, 2, 4 ..., spread so that not all come at once."""
    wait = after_s if after_s is not None else 2.0**attempt
    return min(wait, LONGEST_WAIT_S) * random.uniform(0.75, 1.25)


async def _post(server: Server, question: Question, settings: Settings) -> Reply:
    path, body = _request(server, question, settings)
    try:
        response = await server.http.post(path, json=body)
    except httpx.HTTPError as error:  # refused, reset, cut off, too slow
        raise _Again(f"{type(error).__name__} {error}".strip()) from None
    if response.status_code in AGAIN:
        said = response.headers.get("retry-after", "")
        after = float(said) if said.replace(".", "", 1).isdigit() else None
        raise _Again(f"HTTP {response.status_code}: {response.text[:200]}", after)
    if response.status_code != 200:
        raise GivenUp(f"HTTP {response.status_code}: {response.text[:200]}")
    try:
        return _read(server, response.json(), settings.eos)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _Again(f"an answer of another form ({type(error).__name__}: {error})") from None


def _request(server: Server, question: Question, settings: Settings) -> tuple[str, dict[str, Any]]:
    if server.kind == "sglang":
        sampling = {
            "temperature": question.temperature,
            "max_new_tokens": settings.max_new_tokens,
            "stop_token_ids": settings.eos,
            **_drawn(question, settings, all_tokens=-1),
        }
        return "/generate", {"input_ids": question.prompt_ids, "sampling_params": sampling}
    body: dict[str, Any] = {
        "model": server.model,
        "max_tokens": settings.max_new_tokens,
        "temperature": question.temperature,
        "seed": question.seed,
        **_drawn(question, settings, all_tokens=0 if server.kind == "vllm" else None),
    }
    if server.kind == "vllm":
        more = {"stop_token_ids": settings.eos, "return_token_ids": True}
        return "/v1/completions", {**body, "prompt": question.prompt_ids, **more}
    body["messages"] = [_as_sent(m) for m in question.messages]
    if question.tools:
        body["tools"] = question.tools
    if settings.template_kwargs:
        body["chat_template_kwargs"] = settings.template_kwargs
    return "/v1/chat/completions", body


def _drawn(question: Question, settings: Settings, *, all_tokens: int | None) -> dict[str, Any]:
    """The limits of sampling, always sent: a server's own defaults may differ. `all_tokens` is how it
    calls no top_k; None: it knows none.
    """
    if not question.temperature:
        return {}
    limits = {"top_p": settings.top_p}
    return limits if all_tokens is None else {**limits, "top_k": settings.top_k or all_tokens}


def _as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """The API takes a call's arguments as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments") or {})
        calls.append({"type": "function", **call, "function": function})
    return {**message, "tool_calls": calls}


def _read(server: Server, data: Any, eos: list[int]) -> Reply:
    if server.kind == "sglang":
        end = data["meta_info"]["finish_reason"]
        return _ids(list(data["output_ids"]), end["type"], end.get("matched"), eos)
    choice = data["choices"][0]
    if server.kind == "vllm":
        ids = list(choice["token_ids"])
        return _ids(ids, choice["finish_reason"], choice.get("stop_reason"), eos)
    said = choice["message"]
    message = {"role": "assistant", "content": said.get("content")}
    reasoning = said.get("reasoning_content") or said.get("reasoning")
    if reasoning:
        message["reasoning_content"] = reasoning
    if said.get("tool_calls"):
        message["tool_calls"] = said["tool_calls"]
    ended = choice["finish_reason"]
    if ended not in ("stop", "length", "tool_calls"):
        raise ValueError(f"finish_reason {ended!r}")
    return Reply(None, message, "length" if ended == "length" else "eos")


def _ids(ids: list[int], ended: str, matched: Any, eos: list[int]) -> Reply:
    """The answer with its end token, which some versions leave out."""
    if ended not in ("stop", "length"):
        raise ValueError(f"finish_reason {ended!r}")
    if not all(isinstance(token, int) for token in ids):
        raise TypeError("token ids that are no numbers")
    if ended == "stop" and (not ids or ids[-1] not in eos):
        ids.append(matched if isinstance(matched, int) else eos[0])
    return Reply(ids, None, "eos" if ended == "stop" else "length")

"""Greedy answers from a running vLLM or SGLang, token for token, with what its metrics say about
drafts. One request at a time, so that a change of the counters is that request's.
"""

import re
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from draftsmith.core import UserError

SETTLE_S = 3.0  # vLLM's counters may lag behind its answer


@dataclass
class Answer:
    """One answer. `rounds` target calls drafted; of the `drafted` tokens `accepted` were verified,
    `accepted_by_slot[k]` times at least k + 1 of them. Without speculation all are 0.
    """

    tokens: list[int]
    seconds: float
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_slot: list[int] = field(default_factory=list)


class Client(Protocol):
    """A server's API."""

    name: str

    def complete(self, prompt_ids: list[int], max_new_tokens: int, eos: list[int]) -> Answer:
        """The server's greedy answer."""
        ...

    def render(
        self, messages: list[dict], tools: list[dict] | None, kwargs: dict
    ) -> list[int] | None:
        """The prompt's tokens as the server's chat endpoint would make them, or None."""
        ...


def connect(url: str) -> Client:
    """The client for whatever answers at `url`. Raises UserError when neither server does."""
    url = url.rstrip("/").removesuffix("/v1")
    try:
        if httpx.get(f"{url}/get_server_info", timeout=10).status_code == 200:
            return SGLang(url)
        version = httpx.get(f"{url}/version", timeout=10)
        if version.status_code == 200:
            return VLLM(url, version.json().get("version", "?"))
        found = f"a server that answers {version.status_code} to /version"
    except (httpx.HTTPError, ValueError) as error:
        found = f"nothing that answers ({type(error).__name__}: {error})"
    raise UserError(
        where=f"--server {url}",
        found=found,
        expected="a running vLLM or SGLang",
        remedy="Check the address and the port.",
    )


def _checked(response: httpx.Response) -> Any:
    if response.status_code != 200:
        raise UserError(
            where=str(response.request.url),
            found=f"HTTP {response.status_code}: {response.text[:300]}",
            expected="an answer",
            remedy="Look into the server's log.",
        )
    return response.json()


class VLLM:
    """vLLM's OpenAI endpoint (`return_token_ids`) and its Prometheus counters (vllm
    v1/spec_decode/metrics.py).
    """

    def __init__(self, url: str, version: str) -> None:
        self.name = f"vLLM {version}"
        self._http = httpx.Client(base_url=url, timeout=600)
        self._model = _checked(self._http.get("/v1/models"))["data"][0]["id"]

    def post(self, prompt_ids: list[int], max_new_tokens: int, eos: list[int]) -> dict[str, Any]:
        """The raw answer of /v1/completions."""
        body = {
            "model": self._model,
            "prompt": prompt_ids,
            "max_tokens": max_new_tokens,
            "temperature": 0.0,
            "stop_token_ids": eos,
            "return_token_ids": True,
        }
        return _checked(self._http.post("/v1/completions", json=body))

    def complete(self, prompt_ids: list[int], max_new_tokens: int, eos: list[int]) -> Answer:
        before, begun = self._counters(), time.perf_counter()
        choice = self.post(prompt_ids, max_new_tokens, eos)["choices"][0]
        seconds = time.perf_counter() - begun
        tokens = choice["token_ids"]
        now = self._settled(before, len(tokens))
        slots = sorted(int(k) for k in now if k.isdigit())
        return Answer(
            tokens=tokens,
            seconds=seconds,
            rounds=now.get("drafts", 0) - before.get("drafts", 0),
            drafted=now.get("draft_tokens", 0) - before.get("draft_tokens", 0),
            accepted=now.get("accepted_tokens", 0) - before.get("accepted_tokens", 0),
            accepted_by_slot=[now[str(k)] - before.get(str(k), 0) for k in slots],
        )

    def render(
        self, messages: list[dict], tools: list[dict] | None, kwargs: dict
    ) -> list[int] | None:
        body = {
            "model": self._model,
            "messages": messages,
            "add_generation_prompt": True,
            "chat_template_kwargs": kwargs,
            **({"tools": tools} if tools else {}),
        }
        response = self._http.post("/tokenize", json=body)
        return response.json()["tokens"] if response.status_code == 200 else None

    def _settled(self, before: dict[str, int], num_tokens: int) -> dict[str, int]:
        """The counters once they cover the answer: its first token comes from the prefill, every
        other one from a round or as an accepted draft.
        """
        deadline = time.monotonic() + SETTLE_S
        while True:
            now = self._counters()
            new = {key: now[key] - before.get(key, 0) for key in now}
            covered = new.get("drafts", 0) + new.get("accepted_tokens", 0) >= num_tokens - 1
            if not now or covered or time.monotonic() > deadline:
                return now
            time.sleep(0.02)

    def _counters(self) -> dict[str, int]:
        """drafts, draft_tokens, accepted_tokens, and by slot "0", "1" ...; empty without drafts."""
        out: dict[str, int] = {}
        for line in self._http.get("/metrics").text.splitlines():
            found = re.match(r"vllm:spec_decode_num_(\w+?)_total(\{.*\})? (\S+)$", line)
            if not found:
                continue
            name, labels, value = found.groups()
            position = re.search(r'position="(\d+)"', labels or "")
            key = position.group(1) if position else name
            out[key] = out.get(key, 0) + int(float(value))
        return out


class SGLang:
    """SGLang's native endpoint: token ids in and out, `spec_verify_ct` in its meta_info (sglang
    srt/managers/tokenizer_manager.py). It tells no acceptance by slot.
    """

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=600)
        info = _checked(self._http.get("/get_server_info"))
        self.name = f"SGLang {info.get('version', '?')}"

    def complete(self, prompt_ids: list[int], max_new_tokens: int, eos: list[int]) -> Answer:
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "stop_token_ids": eos}
        begun = time.perf_counter()
        body = {"input_ids": prompt_ids, "sampling_params": sampling}
        out = _checked(self._http.post("/generate", json=body))
        seconds = time.perf_counter() - begun
        rounds = int(out["meta_info"].get("spec_verify_ct", 0))
        tokens = list(out["output_ids"])
        return Answer(tokens, seconds, rounds=rounds, accepted=max(0, len(tokens) - 1 - rounds))

    def render(
        self, messages: list[dict], tools: list[dict] | None, kwargs: dict
    ) -> list[int] | None:
        return None

"""Answers by servers of the target: every conversation turn by turn, many at a time.

An answer becomes part of the conversation before the next one is asked for. Where the data's answer
called tools, their results are replayed: after the target's own calls when there are as many, else
after the data's answer (the target's is kept for its own turn). Servers of token ids return calls as
text: they are counted by what the template writes before a call, and stand in the history as text.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith import tables
from draftsmith.config import RunConfig
from draftsmith.core import UserError
from draftsmith.files import digest, write_atomic
from draftsmith.monitor.state import StageReport
from draftsmith.prepare.messages import Bad, checked
from draftsmith.regenerate.journal import Journal
from draftsmith.serving.ask import GivenUp, Pool, Question, Reply, Settings, connect
from draftsmith.serving.launch import Launched
from draftsmith.target.load import eos_ids
from draftsmith.tokenize.rows import render_chat
from draftsmith.tokenize.template import as_served, call_opening

HOPELESS = 24  # questions given up in a row, without an answer between them
FAILURES = "failures.jsonl"


@dataclass(frozen=True)
class Conversation:
    """A conversation to be answered at `turns`, places in `messages` (the last may be its length)."""

    sample_id: int
    split: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    turns: list[int]
    where: str


Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, str], list[int]]
"""Messages, tools, place -> the prompt's token ids."""


def question_seed(cfg: RunConfig, sample_id: int, turn: int) -> int:
    """What a question's answer is drawn with: its own, whatever else is asked."""
    return int(digest([cfg.seed, sample_id, turn])[:8], 16) >> 1


class NoAnswers(Exception):
    """So many questions in a row were given up that the servers must be at fault."""


def answer_all(
    cfg: RunConfig,
    tokenizer: Any,
    conversations: Iterator[Conversation],
    total: int,
    render: Render,
    out: Path,
    report: StageReport,
) -> tuple[list[str], dict[str, Any]]:
    """Ask for every answer that the journal in `out` lacks; the names of the answer files, and counts."""
    journal = Journal(out)
    report.working(total, "answers", done=len(journal))
    launched = []
    try:
        for replica in range(cfg.regenerate.replicas if cfg.regenerate.launch else 0):
            command = str(cfg.regenerate.launch).replace("{replica}", str(replica))
            log = cfg.root / "logs" / f"server-{replica}.log"
            launched.append(Launched(command, [], log, where="regenerate.launch"))
        for server in launched:
            server.wait(cfg.regenerate.wait_s)
        urls = [server.url for server in launched] or cfg.regenerate.servers
        asking = _Asking(cfg, tokenizer, journal, render, report)
        asyncio.run(asking.run(urls, conversations, launched))
    finally:
        for server in launched:
            server.stop()
        journal.close()
    names = _settle(cfg, journal, total, out)
    return names, {**asking.counts, "failed": len(journal.failures)}


class _Asking:
    """The state of one pass over the conversations."""

    def __init__(
        self, cfg: RunConfig, tokenizer: Any, journal: Journal, render: Render, report: StageReport
    ) -> None:
        self.cfg, self.tokenizer, self.journal = cfg, tokenizer, journal
        self.render, self.report = render, report
        self.eos = eos_ids(tokenizer, cfg.target)
        self.counts = {"too_long": 0}
        self.tokens = self.given_up = 0

    async def run(
        self, urls: list[str], conversations: Iterator[Conversation], launched: list[Launched]
    ) -> None:
        """Answer them all."""
        asked = self.cfg.regenerate
        settings = Settings(
            max_new_tokens=asked.max_new_tokens,
            eos=self.eos,
            template_kwargs=self.cfg.tokenize.template_kwargs,
            concurrency=asked.concurrency,
            timeout_s=asked.timeout_s,
            retries=asked.retries,
            model=self.cfg.target.model,
            top_p=asked.top_p,
            top_k=asked.top_k,
        )
        servers = [await connect(url, settings) for url in urls]
        self.report.event("servers", servers=[[s.url, s.kind, s.model] for s in servers])
        pool = Pool(servers, settings)
        watch = asyncio.create_task(_revive(launched, asked.wait_s))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(asked.concurrency * len(urls)):
                    group.create_task(self._work(pool, conversations))
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
            raise (self._hopeless(urls, first) if isinstance(first, NoAnswers) else first) from None
        finally:
            watch.cancel()
            await pool.close()

    def _hopeless(self, urls: list[str], last: BaseException) -> UserError:
        return UserError(
            where=f"regenerate, {', '.join(urls)}",
            found=f"{HOPELESS} questions in a row without an answer; the last: {last}",
            expected="servers that answer",
            remedy="Look into their logs; the same command goes on from the answers it has.",
        )

    async def _work(self, pool: Pool, conversations: Iterator[Conversation]) -> None:
        for conversation in conversations:  # shared: each takes the next one
            await self._converse(pool, conversation)

    async def _converse(self, pool: Pool, chat: Conversation) -> None:
        messages = list(chat.messages)
        for turn in chat.turns:
            key = (chat.sample_id, turn)
            if key not in self.journal:
                try:
                    record = await self._ask(pool, chat, messages[:turn], turn)
                except GivenUp as error:
                    self._give_up(chat, turn, str(error))
                    return  # what follows would stand on an answer that is not there
                if record is None:
                    self.counts["too_long"] += 1
                    return
                self.journal.add(record)
                self.given_up = 0
                self.tokens += len(record["answer_ids"])
                last = {"tokens": self.tokens, "asked again": pool.repeated}
                self.report.progress(len(self.journal), **last)
            if turn != chat.turns[-1]:
                own = json.loads(self.journal.get(key)["message"])
                opening = call_opening(
                    self.tokenizer, chat.tools, self.cfg.tokenize.template_kwargs
                )
                messages[turn] = in_history(messages[turn], own, opening)

    def _give_up(self, chat: Conversation, turn: int, reason: str) -> None:
        self.journal.fail(chat.sample_id, turn, f"{chat.where}: {reason}")
        self.given_up += 1
        if self.given_up >= HOPELESS:
            raise NoAnswers(reason)

    async def _ask(
        self, pool: Pool, chat: Conversation, messages: list[dict[str, Any]], turn: int
    ) -> dict[str, Any] | None:
        messages = as_served(
            self.tokenizer,
            messages,
            chat.tools,
            self.cfg.tokenize.template_kwargs,
            where=chat.where,
        )
        prompt = self.render(messages, chat.tools, chat.where)
        if len(prompt) >= self.cfg.tokenize.max_length_tokens:
            return None
        greedy = chat.split == "held_out"
        question = Question(
            messages,
            chat.tools,
            prompt,
            temperature=0.0 if greedy else self.cfg.regenerate.temperature,
            seed=question_seed(self.cfg, chat.sample_id, turn),
        )
        reply = await pool.ask(question)
        ids, message = self._both_forms(reply, prompt, messages, chat)
        return {
            "sample_id": chat.sample_id,
            "turn": turn,
            "prompt_ids": prompt,
            "answer_ids": ids,
            "stop_reason": reply.stop_reason,
            "message": json.dumps(message),
        }

    def _both_forms(
        self, reply: Reply, prompt: list[int], messages: list[dict[str, Any]], chat: Conversation
    ) -> tuple[list[int], dict[str, Any]]:
        """Token ids and message. Ids that a server returned are kept as they are."""
        if reply.ids is not None:
            text = reply.ids[:-1] if reply.stop_reason == "eos" else reply.ids
            content = self.tokenizer.decode(text, skip_special_tokens=False)
            return reply.ids, {"role": "assistant", "content": content}
        assert reply.message is not None, "a reply has ids or a message"
        try:
            asked = {"role": "user", "content": "-"}
            message = checked({"messages": [asked, reply.message]})["messages"][1]
        except Bad as bad:
            raise GivenUp(f"an answer that is none ({bad.found})") from None
        if reply.stop_reason == "length" and not (message["content"] or "").strip():
            raise GivenUp("an answer cut off in its reasoning or in a tool call")
        kwargs = self.cfg.tokenize.template_kwargs
        try:
            ids, _ = render_chat(
                self.tokenizer,
                [*messages, message],
                chat.tools,
                kwargs,
                self.eos,
                where=chat.where,
            )
        except UserError as error:
            raise GivenUp(f"an answer that the template refuses ({error})") from None
        if ids[: len(prompt)] != prompt:
            raise GivenUp("an answer that the template does not write after its prompt")
        ids = ids[len(prompt) :]
        if reply.stop_reason == "length" and ids and ids[-1] in self.eos:
            ids.pop()  # the template's, not the target's
        return ids, message


def in_history(given: dict[str, Any], own: dict[str, Any], opening: str | None) -> dict[str, Any]:
    """The answer that the next turn sees. `opening` is what stands before a call in a text."""
    calls = given.get("tool_calls") or []
    if not calls:
        return own
    if opening and (own.get("content") or "").count(opening) == len(calls):
        return own
    if len(own.get("tool_calls") or []) != len(calls):
        return given
    named = [
        {**mine, "id": call["id"]} if call.get("id") else mine
        for mine, call in zip(own["tool_calls"], calls, strict=True)
    ]
    return {**own, "tool_calls": named}


async def _revive(launched: list[Launched], wait_s: float) -> None:
    """Start a launched server again when it dies; asking goes on with the others meanwhile."""
    while launched:
        await asyncio.sleep(1)
        for server in launched:
            if not server.alive():
                with contextlib.suppress(UserError):  # then questions are given up, and it is said
                    await asyncio.to_thread(server.revive, wait_s)


def _settle(cfg: RunConfig, journal: Journal, total: int, out: Path) -> list[str]:
    """The journal's answers as Parquet files, its failures as a list."""
    most = cfg.regenerate.max_failures
    if len(journal.failures) > most * total:
        first = next(iter(journal.failures.values()))
        raise UserError(
            where="regenerate",
            found=f"{len(journal.failures)} of {total} questions without an answer, the first {first}",
            expected=f"at most a share of {most}",
            remedy="Run it again: only these are asked again. Or raise regenerate.max_failures.",
        )
    names, rows = [], []
    for record in journal.answers():
        full = len(rows) >= cfg.regenerate.answers_per_file
        if full and record["sample_id"] != rows[-1]["sample_id"]:
            names.append(_write(out, len(names), rows))
            rows = []
        rows.append(record)
    if rows:
        names.append(_write(out, len(names), rows))
    if journal.failures:
        lines = [
            json.dumps({"sample_id": sample, "turn": turn, "reason": reason}) + "\n"
            for (sample, turn), reason in sorted(journal.failures.items())
        ]
        write_atomic(out / FAILURES, lambda path: path.write_text("".join(lines)))
        names.append(FAILURES)
    return names


def _write(out: Path, number: int, rows: list[dict[str, Any]]) -> str:
    name = f"answers-{number:05d}.parquet"
    tables.write_table(out / name, rows, tables.ANSWERS)
    return name

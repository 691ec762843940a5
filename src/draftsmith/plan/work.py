"""What there is to do: samples and tokens, from the run's own data as far as it is made, else from
counts that are given.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import draftsmith.tokenize as tokenize_stage
from draftsmith import manifest as manifests
from draftsmith import prepare, tables
from draftsmith.config import RunConfig
from draftsmith.core import UserError
from draftsmith.drafter.blocks import anchor_limit, anchor_share
from draftsmith.target.load import load_tokenizer

ANSWER_SHARE = 0.5
SAMPLED = 256


@dataclass(frozen=True)
class Work:
    """Both splits together; `anchors` are those of one epoch of training."""

    samples: int
    tokens: int
    answer_tokens: int
    anchors: int
    source: str

    @property
    def mean_tokens(self) -> float:
        """Tokens a sample."""
        return self.tokens / self.samples

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "mean_tokens": round(self.mean_tokens, 1)}


def workload(cfg: RunConfig, samples: int | None, tokens: int | None) -> Work:
    """Given counts; else RUN/data/tokens; else RUN/data/conversations, some of which are tokenized
    now. Raises UserError when there is nothing to count.
    """
    if samples is not None and tokens is not None:
        return _given(cfg, samples, tokens, "given counts")
    described = manifests.read(tokenize_stage.folder(cfg))
    if samples is None and tokens is None and described and described["complete"]:
        return _tokenized(cfg, described)
    described = manifests.read(prepare.folder(cfg))
    if described and described["complete"]:
        counts = described["counts"]
        there = counts["train"] + counts["held_out"] if samples is None else samples
        if tokens is not None:
            return _given(cfg, there, tokens, "RUN/data/conversations, given tokens")
        tokens = round(there * _mean_tokens(cfg, described))
        text = f"RUN/data/conversations, {SAMPLED} of them tokenized now"
        return _given(cfg, there, tokens, text)
    raise UserError(
        where=str(cfg.root),
        found="no prepared data"
        + (" and one of --samples and --tokens" if samples or tokens else ""),
        expected="RUN/data/conversations or RUN/data/tokens, or both counts",
        remedy="Give --samples 913K --tokens 913M, or run `draftsmith prepare CONFIG`.",
    )


def _given(cfg: RunConfig, samples: int, tokens: int, source: str) -> Work:
    """Anchors as if every answer were as long as the mean. Raises UserError for less than a token a sample."""
    if not 0 < samples <= tokens:
        raise UserError(
            where="--samples and --tokens",
            found=f"{samples:,} samples, {tokens:,} tokens in all of them",
            expected="at least a token a sample",
            remedy="Give all their tokens together, such as --samples 913K --tokens 913M.",
        )
    answer = tokens * ANSWER_SHARE
    anchors = min(cfg.train.anchors_per_sample, max(0.0, answer / samples - 1)) * samples
    text = f"{source}; {ANSWER_SHARE:.0%} of the tokens taken as answers"
    return Work(samples, tokens, round(answer), round(anchors), text)


def _tokenized(cfg: RunConfig, described: dict[str, Any]) -> Work:
    samples = tokens = answer = 0
    places: list[int] = []
    for row in tables.read_rows(tokenize_stage.folder(cfg), described):
        mask = np.asarray(row["loss_mask"], dtype=np.uint8)
        samples, tokens, answer = samples + 1, tokens + len(mask), answer + int(mask.sum())
        if row["split"] == "train":
            places.append(int((mask[:-1] & mask[1:]).sum()))
    share = anchor_share(places, cfg.train.anchors_per_sample)
    anchors = sum(anchor_limit(n, share, cfg.train.blocks_together) for n in places)
    return Work(samples, tokens, answer, anchors, "RUN/data/tokens")


def _mean_tokens(cfg: RunConfig, described: dict[str, Any]) -> float:
    """Mean length of some conversations with the answers that they came with, cut at the longest."""
    tokenizer, lengths = load_tokenizer(cfg.target), []
    for row in tables.read_rows(prepare.folder(cfg), described):
        if len(lengths) == SAMPLED:
            break
        answer = [json.loads(row["answer"])] if row["answer"] else []
        ids = tokenizer.apply_chat_template(
            [*json.loads(row["messages"]), *answer],
            tools=json.loads(row["tools"]) if row["tools"] else None,
            tokenize=True,
            return_dict=False,
            **cfg.tokenize.template_kwargs,
        )
        lengths.append(min(len(ids), cfg.tokenize.max_length_tokens))
    assert lengths, "prepare leaves no empty output"
    return sum(lengths) / len(lengths)

"""Numbers about acceptance: tau pooled and mean, its interval over prompts, survival, histogram,
identity of text.

tau = tokens emitted per target verification (accepted drafts + 1); the prefill's token is not
counted, and a round cut by the answer's end counts what it emitted. Intervals are bootstraps over
prompts, since prompts dominate the variance.
"""

from typing import Any

import numpy as np

from draftsmith.decode.speculate import Trace

NEAR_TIES = {"float32": 1e-3, "bfloat16": 0.25}
"""Top-2 logit gaps under which rounding may choose either token. In bf16 logits between 16 and 32
are 0.125 apart, and each of the two may be off by one step.
"""


NOT_COMPARED = {"identical": None, "mismatches": 0, "near_ties": 0, "differences": []}


def summarize(
    traces: list[Trace],
    reference: list[Trace],
    block_size: int,
    *,
    dtype: str = "float32",
    sampled: bool = False,
    domains: list[str] | None = None,
) -> dict[str, Any]:
    """One method's entry in report.json. `reference` are the autoregressive traces of the same
    prompts; `dtype` is what both were computed in; `domains` names each prompt's. Sampled texts are
    not compared: only their distributions are equal.
    """
    rounds = np.array([len(t.emitted) for t in traces])
    tokens = np.array([sum(t.emitted) for t in traces])
    emitted = (
        np.concatenate([t.emitted for t in traces]).astype(int)
        if rounds.sum()
        else np.zeros(0, int)
    )
    accepted = (
        np.concatenate([t.accepted for t in traces]).astype(int)
        if rounds.sum()
        else np.zeros(0, int)
    )
    seconds = sum(t.decode_s for t in traces)
    rate = float(tokens.sum() / seconds) if seconds else 0.0
    base_s = sum(t.decode_s for t in reference)
    base_rate = sum(sum(t.emitted) for t in reference) / base_s if base_s else 0.0
    has = rounds > 0
    return {
        "tau_pooled": float(tokens.sum() / max(1, rounds.sum())),
        "tau_mean": float((tokens[has] / rounds[has]).mean()) if has.any() else 1.0,
        "tau_ci95": bootstrap_tau(tokens, rounds),
        "tau_mean_ci95": bootstrap_mean(tokens[has] / rounds[has]),
        "survival": [
            float((accepted >= k).mean()) if len(accepted) else 0.0 for k in range(1, block_size)
        ],
        "histogram": np.bincount(emitted, minlength=block_size + 1).tolist(),
        "by_position": by_position(traces),
        "by_domain": by_domain(traces, domains or [""] * len(traces)),
        "target_calls_per_token": float(rounds.sum() / max(1, tokens.sum())),
        "tokens_per_s": rate,
        "speedup": rate / base_rate if base_rate else 0.0,
        "shares": {
            part: sum(getattr(t, f"{part}_s") for t in traces) / seconds if seconds else 0.0
            for part in ("draft", "verify", "commit")
        },
        "num_rounds": int(rounds.sum()),
        "num_tokens": int(sum(len(t.tokens) for t in traces)),
        "stop_reasons": {
            reason: sum(t.stop_reason == reason for t in traces)
            for reason in ("eos", "length", "loop")
        },
        **(NOT_COMPARED if sampled else compare(traces, reference, NEAR_TIES[dtype])),
    }


POSITIONS = (0, 64, 256, 512, 1024, 2048, 4096, 1 << 62)
"""Where in the answer a round begins, for tau by position."""


def by_position(traces: list[Trace]) -> list[dict[str, Any]]:
    """tau of the rounds that begin in [from, to) tokens of the answer; empty ones are left out."""
    rounds = [
        (begin, count)
        for trace in traces
        for begin, count in zip(
            np.cumsum([1, *trace.emitted[:-1]]).tolist(), trace.emitted, strict=False
        )
    ]
    out = []
    for low, high in zip(POSITIONS, POSITIONS[1:], strict=False):
        mine = [count for begin, count in rounds if low <= begin < high]
        if mine:
            top = high if high < 1 << 62 else None
            tau = sum(mine) / len(mine)
            out.append({"from": low, "to": top, "tau": tau, "rounds": len(mine)})
    return out


def by_domain(traces: list[Trace], domains: list[str]) -> dict[str, dict[str, Any]]:
    """Pooled tau, its interval and the prompts of each domain."""
    out = {}
    for domain in sorted(set(domains)):
        mine = [t for t, its in zip(traces, domains, strict=True) if its == domain]
        tokens = np.array([sum(t.emitted) for t in mine])
        rounds = np.array([len(t.emitted) for t in mine])
        out[domain] = {
            "tau_pooled": float(tokens.sum() / max(1, rounds.sum())),
            "tau_ci95": bootstrap_tau(tokens, rounds),
            "num_prompts": len(mine),
        }
    return out


def bootstrap_mean(values: np.ndarray, num_draws: int = 2000, seed: int = 0) -> list[float]:
    """95% interval of the mean over resampled prompts."""
    if not len(values):
        return [1.0, 1.0]
    draws = np.random.default_rng(seed).integers(0, len(values), (num_draws, len(values)))
    return [float(x) for x in np.percentile(values[draws].mean(1), [2.5, 97.5])]


def bootstrap_tau(
    tokens: np.ndarray, rounds: np.ndarray, num_draws: int = 2000, seed: int = 0
) -> list[float]:
    """95% interval of pooled tau over resampled prompts."""
    draws = np.random.default_rng(seed).integers(0, len(tokens), (num_draws, len(tokens)))
    taus = tokens[draws].sum(1) / np.maximum(1, rounds[draws].sum(1))
    return [float(x) for x in np.percentile(taus, [2.5, 97.5])]


def compare(
    traces: list[Trace], reference: list[Trace], near_tie: float = NEAR_TIES["float32"]
) -> dict[str, Any]:
    """How many texts equal the autoregressive ones. A difference is judged where it begins, a near
    tie or a mismatch; and behind it by what one plain forward over the differing text says of each
    of its tokens.
    """
    differing: list[dict[str, Any]] = []
    for prompt, (trace, ref) in enumerate(zip(traces, reference, strict=True)):
        if trace.tokens == ref.tokens:
            continue
        at = next(
            (i for i, (a, b) in enumerate(zip(trace.tokens, ref.tokens, strict=False)) if a != b),
            min(len(trace.tokens), len(ref.tokens)),
        )
        gap = ref.gaps[at] if at < len(ref.gaps) else float("inf")
        differing.append({"prompt": prompt, "token": at, "top2_gap": gap})
        if trace.forced_gaps:
            forced = [gap for gap in trace.forced_gaps if gap > 0]
            differing[-1]["forced_not_argmax"] = len(forced)
            differing[-1]["forced_largest_gap"] = max(forced, default=0.0)
    near = [d for d in differing if d["top2_gap"] <= near_tie]
    return {
        "identical": len(traces) - len(differing),
        "mismatches": len(differing) - len(near),
        "near_ties": len(near),
        "differences": differing,
    }

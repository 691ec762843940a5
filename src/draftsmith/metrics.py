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
) -> dict[str, Any]:
    """One method's entry in report.json. `reference` are the autoregressive traces of the same
    prompts; `dtype` is what both were computed in. Sampled texts are not compared: only their
    distributions are equal.
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
        "survival": [
            float((accepted >= k).mean()) if len(accepted) else 0.0 for k in range(1, block_size)
        ],
        "histogram": np.bincount(emitted, minlength=block_size + 1)[: block_size + 1].tolist(),
        "target_calls_per_token": float(rounds.sum() / max(1, tokens.sum())),
        "tokens_per_s": rate,
        "speedup": rate / base_rate if base_rate else 0.0,
        "num_rounds": int(rounds.sum()),
        "num_tokens": int(sum(len(t.tokens) for t in traces)),
        "stop_reasons": {
            reason: sum(t.stop_reason == reason for t in traces)
            for reason in ("eos", "length", "loop")
        },
        **(NOT_COMPARED if sampled else compare(traces, reference, NEAR_TIES[dtype])),
    }


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
    """How many texts equal the autoregressive ones. A difference is judged where it begins: a near
    tie or a mismatch.
    """
    differing = []
    for prompt, (trace, ref) in enumerate(zip(traces, reference, strict=True)):
        if trace.tokens == ref.tokens:
            continue
        at = next(
            (i for i, (a, b) in enumerate(zip(trace.tokens, ref.tokens, strict=False)) if a != b),
            min(len(trace.tokens), len(ref.tokens)),
        )
        gap = ref.gaps[at] if at < len(ref.gaps) else float("inf")
        differing.append({"prompt": prompt, "token": at, "top2_gap": gap})
    near = [d for d in differing if d["top2_gap"] <= near_tie]
    return {
        "identical": len(traces) - len(differing),
        "mismatches": len(differing) - len(near),
        "near_ties": len(near),
        "differences": differing,
    }

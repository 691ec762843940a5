"""How much of a block published drafters get right, for what a round costs to be turned into a speedup
before there is a drafter. Measured by others; not re-measured here.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Survival of slots 1, 2, ... of a chain, and the tau of a tree of the same drafter where its source
    has one.
    """

    name: str
    source: str
    survival: list[float]
    tree_tau: float | None = None

    def tau(self, block_size: int) -> float:
        """Of a chain of this block: 1 + the sum of its slots' survival."""
        return 1 + sum(self.survival[: block_size - 1])


def even(tau: float, slots: int = 15) -> list[float]:
    """Survival of a drafter that is right equally often at every slot, with this tau: what a published
    tau alone allows.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (
            (rate, high) if 1 + sum(rate**k for k in range(1, slots + 1)) < tau else (low, rate)
        )
    return [low**k for k in range(1, slots + 1)]


ZLAB = "z-lab/Qwen3.6-27B-DFlash, greedy, thinking off, SGLang (CHOI0126/minsik-repro)"
CURVES = [
    Curve("humaneval", ZLAB, even(11.24)),
    Curve("math500", ZLAB, even(7.83)),
    Curve("gsm8k", ZLAB, even(7.32)),
    Curve("mt-bench", ZLAB, even(4.83)),
    Curve(
        "qwen3-8b-b8",
        "mgoin/Qwen3-8B-speculator.dflash, per-position rates",
        [0.665, 0.474, 0.338, 0.243, 0.180, 0.141, 0.115],
    ),
    Curve(
        "tree-humaneval",
        "Qwen3.5-27B Q4, HumanEval, tree of 22 (Luce-Org/lucebox RESULTS.md)",
        even(7.67),
        8.31,
    ),
    Curve(
        "tree-sampled",
        "Qwen3.6-27B Q5, temperature 1, tree of 22 (Luce-Org/lucebox PR 413)",
        even(5.57),
        6.74,
    ),
    Curve(
        "tree-open-prompts",
        "Qwen3.8-27B DFlash2, greedy (rmagur1203/vllm-ddtree findings)",
        even(3.20),
        3.33,
    ),
    Curve(
        "tree-loses",
        "Qwen3.6-35B-A3B (patrickbdevaney/dflash-caddtree-integrations)",
        even(5.75),
        5.70,
    ),
]

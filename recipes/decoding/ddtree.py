"""Our trees and loop beside those of github.com/liranringel/ddtree (MIT), on a CPU in fp32.

    git clone https://github.com/liranringel/ddtree /tmp/ddtree
    python recipes/decoding/ddtree.py /tmp/ddtree          # from the repository's root; pip install '.[test]'

Trees: the same tokens and parents in the same order, from random logits, from logits rounded to
bf16 and from whole numbers (full of ties). Loops: their ddtree_generate and dflash_generate, a tiny
random Qwen3 and a drafter that has learnt half of its texts; the same tokens and the same acceptance
in every round. Three things of theirs are replaced, none of them arithmetic: loguru, the wait for a
GPU in cuda_time, and DynamicCache.crop, whose positive lengths Transformers 5.24 refuses.
"""

import itertools
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3Config

sys.path[:0] = ["tests", "tests/unit"]
from test_decode import decode  # noqa: E402
from test_peers import learnt  # noqa: E402

from draftsmith.decode.propose import DraftProposer, NoProposer  # noqa: E402
from draftsmith.decode.tree import Draft, best_first  # noqa: E402
from draftsmith.drafter.config import zlab_config  # noqa: E402
from draftsmith.drafter.model import ContextCache, DFlash  # noqa: E402
from tiny_models import build, random_ids  # noqa: E402

SEEDS, LENGTHS, VOCABULARIES = range(20), (1, 7, 15), (5, 128, 4096)
TREE_BUDGETS, LOOP_BUDGETS = (1, 4, 15, 16, 64, 256), (1, 7, 16, 64)
PROMPTS = ((1, 60), (12, 47), (30, 60))  # tokens, and the longest answer
ROUNDED = {
    "fp32": lambda x: x,
    "bf16": lambda x: x.bfloat16().float(),
    "whole": lambda x: x.round(),
}


class PlainTrees:
    """The drafter's trees without the chain first, as theirs."""

    def __init__(self, drafter: DFlash, budget: int) -> None:
        self._drafter, self._budget, self._cache = drafter, budget, ContextCache(drafter)

    def extend(self, token_ids: list[int], features: Tensor) -> None:
        self._cache.append(features)

    def propose(self, anchor_id: int) -> Draft:
        logits = self._drafter.slots(anchor_id, self._cache)
        return best_first(anchor_id, logits, self._budget, chain_first=False)


def main(checkout: Path) -> None:
    """Both comparisons; AssertionError at the first difference."""
    theirs = load(checkout)
    trees(theirs)
    loops(theirs)


def load(checkout: Path) -> Any:
    """Their module, able to run on a CPU."""
    sys.modules["loguru"] = SimpleNamespace(logger=None)  # pyright: ignore[reportArgumentType]
    sys.path.insert(0, str(checkout))
    import ddtree  # pyright: ignore[reportMissingImports]
    import dflash as chains  # the checkout's dflash.py, not the package

    ddtree.cuda_time = chains.cuda_time = time.perf_counter
    crop = DynamicCache.crop
    DynamicCache.crop = lambda self, length: crop(self, min(0, length - self.get_seq_length()))
    return ddtree


def trees(theirs: Any) -> None:
    """Node by node."""
    for kind, rounded in ROUNDED.items():
        count = nodes = 0
        for seed, L, V in itertools.product(SEEDS, LENGTHS, VOCABULARIES):
            logits = rounded(2 * torch.randn(L, V, generator=torch.Generator().manual_seed(seed)))
            for budget in TREE_BUDGETS:
                tokens, _, parents, *_ = theirs.build_ddtree_tree(logits, budget)
                ours = best_first(0, logits, budget, chain_first=False)
                where = f"{kind} seed {seed} L {L} V {V} budget {budget}"
                assert ours.tokens[1:] == tokens.tolist(), where
                assert ours.parents == parents, where
                count, nodes = count + 1, nodes + len(parents) - 1
        print(f"trees, {kind} logits: {count} equal, {nodes} nodes")


def loops(theirs: Any) -> None:
    """Round by round, to an end token or our length limit. Theirs is a block longer: with a budget
    under block_size - 1 their last blocks before it are cut short. They also drop tokens equal to the
    mask's id from the text.
    """
    model = build("qwen3")
    prompts = [random_ids(n, seed=n) for n, _ in PROMPTS]
    drafter = learnt(model, prompts, ("full_attention",) * 2)
    config = Qwen3Config(**zlab_config(drafter.shape, "float32"))
    config._attn_implementation = "sdpa"
    twin = theirs.DFlashDraftModel(config).eval()
    twin.load_state_dict(drafter.state_dict())
    mask_id = drafter.shape.mask_token_id
    block = drafter.shape.block_size
    for budget in (None, *LOOP_BUDGETS):
        lengths: list[int] = []
        masks = texts = 0
        for prompt, (_, limit) in zip(prompts, PROMPTS, strict=True):
            end = decode(model, prompt, NoProposer(), max_new=limit).tokens[33]
            for eos in (None, [end]):
                args = (twin, model, torch.tensor([prompt]), mask_id, limit + block, block, eos)
                generate = theirs.ddtree_generate if budget else theirs.dflash_generate
                want = generate(*args, **({"tree_budget": budget} if budget else {}))
                proposer = PlainTrees(drafter, budget) if budget else DraftProposer(drafter)
                got = decode(model, prompt, proposer, max_new=limit, eos=eos or ())
                kept = [token for token in prompt + got.tokens if token != mask_id]
                rounds = [accepted + 1 for accepted in got.accepted]
                where = f"budget {budget}, prompt of {len(prompt)}, end {eos}"
                assert kept == want.output_ids[0].tolist()[: len(kept)], where
                assert rounds == want.acceptance_lengths[: len(rounds)], where
                masks += got.tokens.count(mask_id)
                lengths += rounds
                texts += 1
        name = f"trees of {budget}" if budget else "chains"
        print(
            f"loops, {name}: {texts} texts, {len(lengths)} rounds equal, lengths {min(lengths)} to "
            f"{max(lengths)}, mean {sum(lengths) / len(lengths):.2f}; {masks} tokens were the mask's id"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))

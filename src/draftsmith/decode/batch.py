"""Answers to many prompts at once, greedy or sampled: left-padded batches that shrink as answers end."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.ends import AnswerEnd, StopReason
from draftsmith.decode.gdn import own_steps
from draftsmith.decode.sampling import Sampling
from draftsmith.decode.session import new_cache
from draftsmith.target.load import text_decoder


@torch.inference_mode()
def generate_batch(
    model: PreTrainedModel,
    prompts: list[list[int]],
    ends: list[AnswerEnd],
    *,
    pad_id: int,
    sampling: list[Sampling] | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> list[tuple[list[int], StopReason]]:
    """Each prompt's answer (ids, why it ended), drawn as its `sampling` says; None: greedy. Left padding
    with a mask is exact on the families of docs/hybrids.md; answers may differ from batch-1 ones where
    two logits nearly tie.
    """
    width = max(len(prompt) for prompt in prompts)
    device = model.device
    ids = torch.full((len(prompts), width), pad_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    alive = list(range(len(prompts)))
    reasons: dict[int, StopReason] = {}
    cache = new_cache(model)
    with own_steps(text_decoder(model), None):
        while True:
            on_step()
            positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
            out = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            tokens = _choose(out.logits[:, -1], [sampling[i] for i in alive] if sampling else [])
            for i, token in zip(alive, tokens.tolist(), strict=True):
                reason = ends[i].push(token) if i not in reasons else None
                if reason is not None:
                    reasons[i] = reason
            keep = [row for row, i in enumerate(alive) if i not in reasons]
            if not keep:
                return [(end.tokens, reasons[i]) for i, end in enumerate(ends)]
            ids, mask = tokens[:, None], torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
            if len(keep) <= 0.8 * len(
                alive
            ):  # finished rows still cost until the batch is worth copying
                rows = torch.tensor(keep, device=device)
                _select(cache, rows)
                ids, mask, alive = ids[rows], mask[rows], [alive[row] for row in keep]


def _choose(logits_BV: Tensor, sampling: list[Sampling]) -> Tensor:
    """The next token of each row [B]."""
    tokens_B = logits_BV.argmax(-1)
    for row, mine in enumerate(sampling):
        if not mine.greedy:
            tokens_B[row] = mine.draw(mine.probabilities(logits_BV[row : row + 1]))[0]
    return tokens_B


def _select(cache, rows: Tensor) -> None:
    for layer in cache.layers:
        layer.reorder_cache(rows)

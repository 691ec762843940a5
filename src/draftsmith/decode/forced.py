"""A text through the plain target, one forward without a cache: what makes every difference of two texts
judgeable, those after the first one too.
"""

import torch
from transformers import PreTrainedModel

from draftsmith.target.load import text_decoder, unembed

ROWS = 512  # logits together: of a 248k vocabulary half a GB in fp32


@torch.inference_mode()
def forced_gaps(model: PreTrainedModel, prompt_ids: list[int], tokens: list[int]) -> list[float]:
    """Of every token of the answer, how far its logit lies below the largest (0: the argmax)."""
    ids = torch.tensor([prompt_ids + tokens], device=model.device)
    hidden = text_decoder(model)(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[0]
    _, head, softcap = unembed(model)
    wanted, out = ids[0, len(prompt_ids) :], []
    for rows, its in zip(
        hidden[len(prompt_ids) - 1 :].split(ROWS), wanted.split(ROWS), strict=True
    ):
        logits = (rows.to(head.device) @ head.T).float()
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        mine = logits.gather(1, its[:, None].to(logits.device))[:, 0]
        out += (logits.max(-1).values - mine).tolist()
    return out

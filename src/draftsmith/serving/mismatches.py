"""Which known mismatch explains a server's acceptance: the drafter is replayed along the served text
as each mistake would run it, and the one whose rounds fit the server's best is named.

Where they were seen: reference issues vllm#40727 (layers off by one), speculators#613 (quarter RoPE,
zero states), vllm#49559 and SpecForge#470 (causality).
"""

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.replay import replay
from draftsmith.drafter.model import DFlash
from draftsmith.target.load import text_decoder
from draftsmith.target.taps import capture, decoder_layers

AS_TRAINED = "as trained"
THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)  # what models and servers default to
FITS = 0.06  # share of rounds that bf16 may move where a mistake fits
NOISE = 0.015  # and where the drafter runs as trained


@dataclass(frozen=True)
class Mismatch:
    """One way to run the drafter: `drafter` as the server would build it, its features taken
    `shift` layers later, or zero.
    """

    name: str
    advice: str
    drafter: DFlash
    shift: int = 0
    zero: bool = False


@dataclass(frozen=True)
class Text:
    """A served answer behind its prompt, the rounds the server took, and the target's states of all
    tokens: {layer: [n, H]}, -1 the embeddings.
    """

    ids: list[int]
    num_prompt: int
    rounds: int
    states: dict[int, Tensor]


@torch.inference_mode()
def states_of(
    model: PreTrainedModel, taps: list[int], ids: list[int]
) -> tuple[dict[int, Tensor], Tensor]:
    """States at the taps and their neighbours, {layer: [n, H]}, and the logits [n, V]."""
    decoder = text_decoder(model)
    last = len(decoder_layers(decoder, "target.model")) - 1
    wanted = sorted({tap + d for tap in taps for d in (-1, 0, 1)} & set(range(last + 1)))
    with capture(decoder, wanted) as seen:
        out = model(
            input_ids=torch.tensor([ids], device=model.device),
            use_cache=False,
            output_hidden_states=True,
        )
    return {-1: out.hidden_states[0][0], **{i: seen[i][0] for i in wanted}}, out.logits[0].float()


def known(drafter: DFlash, suspects: list[int]) -> list[Mismatch]:
    """The mistakes worth trying; `suspects` are token ids a server may take for the mask."""
    shape = drafter.shape
    out = [Mismatch(AS_TRAINED, "", drafter)]
    for shift, way in ((-1, "early"), (1, "late")):
        advice = (
            f"the server reads layers {[t + shift for t in shape.taps]}: check target_layer_ids "
            "(0-based) against aux ids (one more), and the server's version"
        )
        out.append(Mismatch(f"layer ids one too {way}", advice, drafter, shift=shift))
    for theta in THETAS:
        if theta != shape.rope_theta:
            advice = f"trained with rope_theta {shape.rope_theta:g}: check rope_parameters in config.json"
            out.append(Mismatch(f"rope: theta {theta:g}", advice, _as(drafter, rope_theta=theta)))
    for factor in (0.25, 0.5):
        advice = "RoPE must turn the whole head: remove partial_rotary_factor from config.json"
        out.append(
            Mismatch(f"rope: partial_rotary_factor {factor}", advice, partial_rope(drafter, factor))
        )
    kinds = {shape.is_causal(kind) for kind in shape.layer_types}
    for causal in (True, False):
        if kinds != {causal}:
            word = "causal" if causal else "bidirectional"
            advice = (
                f"every layer ran {word} inside the block: check is_causal and dflash_config.causal"
            )
            out.append(
                Mismatch(f"causality: all layers {word}", advice, _as(drafter, causal=causal))
            )
    for token in suspects:
        if token != shape.mask_token_id:
            advice = (
                f"the block must be filled with token {shape.mask_token_id}: check mask_token_id"
            )
            out.append(Mismatch(f"mask id {token}", advice, _as(drafter, mask_token_id=token)))
    advice = "the server feeds the drafter zeros: its target does not hand out hidden states"
    out.append(Mismatch("all-zero states", advice, drafter, zero=True))
    return out


def _as(drafter: DFlash, **changes: Any) -> DFlash:
    other = copy.copy(drafter)
    other.shape = dataclasses.replace(drafter.shape, **changes)
    return other


class _PartialRope(DFlash):
    """RoPE over the first dims of each head only; see partial_rope."""

    turned: int

    def rope(self, positions_bT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        half, turned = self.shape.head_dim // 2, self.turned
        steps = torch.arange(0, turned, 2, device=positions_bT.device, dtype=torch.float32)
        inverse = torch.zeros(half, device=positions_bT.device)
        inverse[: turned // 2] = self.shape.rope_theta ** -(steps / turned)
        angles = (positions_bT[..., None].float() * inverse).repeat(1, 1, 2)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def partial_rope(drafter: DFlash, factor: float) -> DFlash:
    """The drafter as a server runs it that turns only `factor` of each head. Such RoPE pairs dims i
    and i + turned/2; ours pairs i and i + d/2, so queries' and keys' dims are put in that order,
    which changes no product of theirs.
    """
    d = drafter.shape.head_dim
    turned = int(d * factor) // 2 * 2
    first, second = list(range(turned // 2)), list(range(turned // 2, turned))
    rest = list(range(turned, d))
    half = len(rest) // 2
    order = torch.tensor(first + rest[:half] + second + rest[half:])
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        if ".q_proj." in name or ".k_proj." in name:
            tensor = tensor.unflatten(0, (-1, d))[:, order].flatten(0, 1)
        elif ".q_norm." in name or ".k_norm." in name:
            tensor = tensor[order]
        tensors[name] = tensor
    other = _PartialRope(drafter.shape)
    other.turned = turned
    other.load_state_dict(tensors)
    like = drafter.fc.weight
    return other.to(like.device, like.dtype).eval().requires_grad_(False).share(*drafter.shared)


def explain(mismatches: list[Mismatch], texts: list[Text]) -> list[dict[str, Any]]:
    """Each mistake with the tau it would give on these texts and how far its rounds are from the
    server's: sum |its - served| / sum served. Best fit first.
    """
    served = sum(text.rounds for text in texts)
    out = []
    for mismatch in mismatches:
        taps = mismatch.drafter.shape.taps
        tokens = rounds = apart = 0
        for text in texts:
            if any(tap + mismatch.shift not in text.states for tap in taps):
                break  # a tap has no neighbour there
            features = torch.stack([text.states[tap + mismatch.shift] for tap in taps], dim=1)
            features = torch.zeros_like(features) if mismatch.zero else features
            ran = replay(mismatch.drafter, text.ids, text.num_prompt, features)
            tokens, rounds = tokens + sum(ran.emitted), rounds + len(ran.emitted)
            apart += abs(len(ran.emitted) - text.rounds)
        else:
            out.append(
                {
                    "name": mismatch.name,
                    "advice": mismatch.advice,
                    "tau": tokens / max(1, rounds),
                    "distance": apart / max(1, served),
                }
            )
    return sorted(out, key=lambda fit: fit["distance"])


def verdict(fits: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The mismatch to name: one that fits, and clearly better than the drafter as trained."""
    best = fits[0]
    ours = next(fit for fit in fits if fit["name"] == AS_TRAINED)
    clear = ours["distance"] > NOISE and best["distance"] <= min(FITS, 0.5 * ours["distance"])
    return best if clear and best["name"] != AS_TRAINED else None

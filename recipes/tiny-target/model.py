"""The tiny target's network: config, initial weights, kernels for training, saving.

Imported by train.py (see there for how to run).
"""

import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import MODEL_ROWS, SPECIAL_TOKENS, TOKENIZER_LENGTH
from torch import nn
from transformers import GenerationConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

CHUNK = 64


def build_config() -> Qwen3_5TextConfig:
    """Qwen3.5's text architecture, reduced to about five million parameters."""
    end_of_text, im_end = (SPECIAL_TOKENS.index(t) for t in ("<|endoftext|>", "<|im_end|>"))
    return Qwen3_5TextConfig(
        vocab_size=MODEL_ROWS,
        hidden_size=256,
        intermediate_size=320,
        num_hidden_layers=8,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
        bos_token_id=None,
        eos_token_id=im_end,
        pad_token_id=end_of_text,
    )


def build_model(start: Path | None) -> Qwen3_5ForCausalLM:
    """Random weights, or those of a saved model, as fp32 master weights."""
    if start is not None:
        return Qwen3_5ForCausalLM.from_pretrained(start, dtype=torch.float32)
    return Qwen3_5ForCausalLM(build_config())


def causal_conv(
    hidden_BDT: torch.Tensor,
    weight_DK: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> torch.Tensor:
    """The causal depthwise convolution as shifted products (F.conv1d's backward is slow)."""
    assert bias is None and activation == "silu", "Qwen3.5's convolution is always like this"
    num_taps = weight_DK.shape[-1]
    length = hidden_BDT.shape[-1]
    padded_BDT = F.pad(hidden_BDT.float(), (num_taps - 1, 0))
    out_BDT = padded_BDT[..., :length] * weight_DK[:, 0, None].float()
    for tap in range(1, num_taps):
        shifted_BDT = padded_BDT[..., tap : tap + length]
        out_BDT = torch.addcmul(out_BDT, shifted_BDT, weight_DK[:, tap, None].float())
    return F.silu(out_BDT).to(hidden_BDT.dtype)


def chunk_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """The gated delta rule over whole rows, from a zero state, all chunks solved at once.

    Shapes: B rows, T tokens, H value heads, K/V head sizes, N chunks of C tokens. query and key
    are [B, T, key heads, K], value is [B, T, H, V], g and beta are [B, T, H].
    """
    length, num_heads = value.shape[1:3]
    pad = -length % CHUNK

    def split(x: torch.Tensor) -> torch.Tensor:
        x = F.pad(x.float().transpose(1, 2), (0, 0, 0, pad))
        return x.unflatten(2, (-1, CHUNK))  # B, H, N, C, ...

    with torch.autocast(value.device.type, enabled=False):
        q, k = (split(l2norm(x.float())) for x in (query, key))
        q = (q * query.shape[-1] ** -0.5).expand(-1, num_heads, -1, -1, -1)
        k = k.expand(-1, num_heads, -1, -1, -1)
        v, beta, decay = split(value), split(beta[..., None]), split(g[..., None]).cumsum(-2)
        lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=value.device).tril()
        ratio = (decay - decay.mT).masked_fill(~lower, -torch.inf).exp()
        keys_t = k.mT
        coupling = ((k @ keys_t) * ratio * beta).tril(-1)  # unit diagonal is implied below
        right_side = torch.cat([v, k * decay.exp()], dim=-1) * beta
        solved = torch.linalg.solve_triangular(
            coupling, right_side, upper=False, unitriangular=True
        )
        new_values, state_keys = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
        scores = (q @ keys_t) * ratio
        last = decay[..., -1:, :]
        q_decayed, k_decayed = q * decay.exp(), (k * (last - decay).exp()).mT
        last = last.exp()
        state = value.new_zeros(len(value), num_heads, k.shape[-1], v.shape[-1]).float()
        outs = []
        for n in range(v.shape[2]):
            change = new_values[:, :, n] - state_keys[:, :, n] @ state
            outs.append(q_decayed[:, :, n] @ state + scores[:, :, n] @ change)
            state = state * last[:, :, n] + k_decayed[:, :, n] @ change
        out = torch.stack(outs, dim=2).flatten(2, 3)[:, :, :length]
    return out.transpose(1, 2).to(value.dtype), None


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """Unit length in the last dimension, as the model's own rule has it."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def fused_norm(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Qwen3.5's zero-centred RMSNorm in one kernel."""
    return F.rms_norm(x.float(), x.shape[-1:], 1.0 + self.weight.float(), self.eps).type_as(x)


def use_training_kernels() -> None:
    """Replace the library's reference kernels by plain PyTorch ones that train fast.

    Nothing has to be compiled, and both devices run the same code. (fla-core 0.6.0 refuses this
    rule's backward pass on Hopper GPUs with Triton 3.4 to 3.7.0.)
    """
    modeling_qwen3_5.causal_conv1d_fn = causal_conv
    modeling_qwen3_5.torch_chunk_gated_delta_rule = chunk_delta_rule
    modeling_qwen3_5.Qwen3_5RMSNorm.forward = fused_norm


@torch.no_grad()
def save_model(model: nn.Module, path: Path) -> None:
    """Save a bf16 copy whose unused embedding rows are the mean of the used ones."""
    saved = copy.deepcopy(model).cpu()
    assert isinstance(saved, Qwen3_5ForCausalLM), "the recipe trains one class only"
    rows = saved.get_input_embeddings().weight
    rows[TOKENIZER_LENGTH:] = rows[:TOKENIZER_LENGTH].mean(dim=0)
    saved.generation_config = GenerationConfig(
        eos_token_id=[SPECIAL_TOKENS.index("<|im_end|>"), SPECIAL_TOKENS.index("<|endoftext|>")],
        pad_token_id=SPECIAL_TOKENS.index("<|endoftext|>"),
    )
    saved.to(torch.bfloat16).save_pretrained(path)

"""Tiny random targets of each family, for exactness tests on a CPU.

Decay is set to long memory (A_log small, dt_bias 0), so that a state that leaks or is not rolled back shows.
"""

from pathlib import Path

import torch
import transformers as tf
from transformers import PreTrainedModel

VOCAB = 128
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
CONFIGS = {
    "qwen3": lambda: tf.Qwen3Config(**BASE, num_hidden_layers=6, head_dim=16),
    "qwen3_5": lambda: tf.Qwen3_5TextConfig(**BASE, num_hidden_layers=4, head_dim=16, **GDN),
    "qwen3_5_moe": lambda: tf.Qwen3_5MoeTextConfig(
        **BASE, num_hidden_layers=4, head_dim=16, **GDN, **MOE
    ),
    "llama": lambda: tf.LlamaConfig(**BASE, num_hidden_layers=4, head_dim=16),
    "qwen3_next": lambda: tf.Qwen3NextConfig(
        **BASE, num_hidden_layers=4, head_dim=16, **GDN, **MOE
    ),
    "olmo_hybrid": lambda: tf.OlmoHybridConfig(
        **BASE, num_hidden_layers=4, **{**GDN, "linear_num_key_heads": 4}
    ),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **BASE,
        num_hidden_layers=6,
        head_dim=16,
        sliding_window=16,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    ),
    "bamba": lambda: tf.BambaConfig(
        **BASE,
        num_hidden_layers=4,
        attn_layer_indices=[2],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_chunk_size=16,
    ),
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
MORE = {
    "qwen2": lambda: tf.Qwen2Config(**BASE, num_hidden_layers=4),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(
        **BASE, num_hidden_layers=4, head_dim=16, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    "gemma4": lambda: tf.Gemma4TextConfig(
        **BASE, num_hidden_layers=6, head_dim=16, global_head_dim=16, sliding_window=16,
        hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCAB,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    ),
    "gpt_oss": lambda: tf.GptOssConfig(
        **BASE, num_hidden_layers=4, head_dim=16, sliding_window=16, num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "lfm2": lambda: tf.Lfm2Config(
        **BASE, num_hidden_layers=4, layer_types=["conv", "conv", "full_attention", "conv"]
    ),
    "kimi_linear": lambda: tf.KimiLinearConfig(**BASE, num_hidden_layers=4),
    "granitemoehybrid": lambda: tf.GraniteMoeHybridConfig(
        **BASE, num_hidden_layers=4, layer_types=["mamba", "mamba", "attention", "mamba"], **MAMBA,
        num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=32,
        position_embedding_type="rope",
    ),
    "nemotron_h": lambda: tf.NemotronHConfig(
        **BASE, num_hidden_layers=4, layers_block_type=["mamba", "moe", "attention", "mamba"],
        mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=16, chunk_size=16, n_groups=2,
        head_dim=16, n_routed_experts=4, moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32, num_experts_per_tok=2,
    ),
    "falcon_h1": lambda: tf.FalconH1Config(
        **BASE, num_hidden_layers=4, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16,
        mamba_d_state=16, mamba_chunk_size=16, head_dim=16,
    ),
    "jamba": lambda: tf.JambaConfig(
        **BASE, num_hidden_layers=4, attn_layer_period=4, attn_layer_offset=2,
        expert_layer_period=2, expert_layer_offset=1, num_experts=4, use_mamba_kernels=False,
    ),
    "zamba2": lambda: tf.Zamba2Config(
        **BASE, num_hidden_layers=4, layers_block_type=["mamba", "hybrid", "mamba", "mamba"],
        mamba_d_state=16, n_mamba_heads=8, mamba_headdim=16, chunk_size=16, mamba_ngroups=1,
    ),
    "minimax": lambda: tf.MiniMaxConfig(
        **BASE, num_hidden_layers=4, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention"] * 2, block_size=16,
    ),
}  # fmt: skip
"""Families whose states are extracted; the ones above are also decoded."""
GDN_FAMILIES = ("qwen3_5", "qwen3_next", "olmo_hybrid")


def build(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A causal LM with seeded random weights, large enough logits that greedy text varies."""
    torch.manual_seed(seed)
    config = (CONFIGS | MORE)[family]()
    config._attn_implementation = "eager" if family == "gpt_oss" else "sdpa"  # it has sinks
    config._experts_implementation = "eager"  # grouped products have no fp64
    model = tf.AutoModelForCausalLM.from_config(config).to(dtype).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, p in model.named_parameters():
        if name.endswith("A_log"):
            p.copy_(torch.log(torch.empty(p.shape).uniform_(0.01, 0.3, generator=generator)))
        elif name.endswith("dt_bias"):
            p.zero_()
        elif p.ndim >= 2 and "norm" not in name:
            fan_in = p.shape[-1] if p.ndim == 2 else p[0].numel()
            p.copy_(torch.randn(p.shape, generator=generator) * fan_in**-0.5)
    return model


def random_ids(count: int, seed: int = 0) -> list[int]:
    """Token ids that are none of pad, bos, eos."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=generator).tolist()


def assets() -> Path:
    """The package's built-in files."""
    import draftsmith

    return Path(draftsmith.__file__).parent / "assets"

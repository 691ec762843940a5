"""vLLM 0.24's hidden-state extractor on a random target of Qwen3.6-27B's dimensions, for the lengths that
`draftsmith bench extract` draws: tokens/s until `generate` returns, and until every file is whole.

    pip install vllm==0.24.0            # in an environment of its own
    sed -i 's/raise RuntimeError("No Qwen3Next layer found in the model.layers.")/self.num_moe_layers = 0; return/' \\
        $(python -c 'import vllm; print(vllm.__path__[0])')/model_executor/models/qwen3_next.py
    python recipes/peers/extract.py --folder /dev/shm/states --median 400 60 2000 --rows 24 12 24

The target is a dense Qwen3-Next (the same layers; this vLLM loads no text-only Qwen3.5), which 0.24.0 refuses for
want of experts: hence the sed. Its Gated DeltaNet runs by Triton, as without FlashInfer. Speed only: whether the
states are right is `draftsmith verify --engine vllm`'s question. Four rows' worth of tokens warm it up.
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import torch

LAYERS, TAPS = 64, (1, 16, 31, 46, 61)
HIDDEN, VOCAB, ROW_TOKENS, LONGEST = 5120, 248320, 16384, 8000
CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": VOCAB,
    "hidden_size": HIDDEN, "intermediate_size": 17408, "num_hidden_layers": LAYERS,
    "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "num_experts": 0, "num_experts_per_tok": 0,
    "decoder_sparse_step": 1, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "mlp_only_layers": list(range(LAYERS)), "full_attention_interval": 4,
    "max_position_embeddings": 262144, "partial_rotary_factor": 0.25, "rope_theta": 1e7,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "layer_types": [
        "full_attention" if i % 4 == 3 else "linear_attention" for i in range(LAYERS)
    ],
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def main() -> None:
    """Start it, warm it up, measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="for the states; emptied")
    parser.add_argument("--median", type=int, nargs="+", default=[400])
    parser.add_argument("--rows", type=int, nargs="+", default=[24], help="of 16,384 tokens each")
    parser.add_argument("--sigma", type=float, default=0.8)
    args = parser.parse_args()
    from vllm import LLM, SamplingParams

    model = Path(tempfile.mkdtemp())
    (model / "config.json").write_text(json.dumps(CONFIG))
    args.folder.mkdir(parents=True, exist_ok=True)
    ids = [tap + 1 for tap in TAPS]
    llm = LLM(
        model=str(model), load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True,
        max_model_len=8192, max_num_batched_tokens=ROW_TOKENS, max_num_seqs=256,
        gpu_memory_utilization=0.9, enable_prefix_caching=False, attention_backend="FLASH_ATTN",
        additional_config={"gdn_prefill_backend": "triton"},
        speculative_config={
            "method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "shared_storage_path": str(args.folder), "use_synchronization_lock": False,
            },
        },
    )  # fmt: skip
    asked = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    measured = list(zip(args.median, args.rows, strict=True))
    for median, rows in [(measured[0][0], 4), *measured]:
        prompts = draw(median, args.sigma, rows * ROW_TOKENS)
        tokens = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
        begun = time.monotonic()
        answers = llm.generate(prompts, asked, use_tqdm=False)
        returned = time.monotonic() - begun
        for prompt, answer in zip(prompts, answers, strict=True):
            size = len(prompt["prompt_token_ids"]) * len(TAPS) * HIDDEN * 2
            wait_for(Path(answer.kv_transfer_params["hidden_states_path"]), size)
        whole = time.monotonic() - begun
        said = {"median": median, "tokens": tokens, "tokens_per_s_returned": tokens / returned}
        print(json.dumps({**said, "tokens_per_s_whole": tokens / whole}), flush=True)
        shutil.rmtree(args.folder)
        args.folder.mkdir()


def draw(median: int, sigma: float, tokens: int) -> list[dict[str, list[int]]]:
    """Random prompts of log-normal length, about `tokens` tokens in all."""
    generator, out = torch.Generator().manual_seed(0), []
    while tokens > 0:
        drawn = float(torch.exp(torch.randn(1, generator=generator) * sigma)) * median
        length = min(max(16, int(drawn)), LONGEST, max(16, tokens))
        ids = torch.randint(2, VOCAB, (length,), generator=generator).tolist()
        out.append({"prompt_token_ids": ids})
        tokens -= length
    return out


def wait_for(path: Path, size: int, limit_s: float = 120) -> None:
    """Until the file holds so many bytes."""
    until = time.monotonic() + limit_s
    while not path.exists() or path.stat().st_size < size:
        if time.monotonic() > until:
            raise SystemExit(f"{path}: not whole after {limit_s} s")
        time.sleep(0.01)


if __name__ == "__main__":
    main()

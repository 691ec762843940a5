"""A training step of speculators 0.9 or SpecForge 0.2 on the synthetic features of `draftsmith bench train`:
same drafter, sequence, anchors and GPU, its own model, mask, loss and optimizer as its trainer calls them.

    python recipes/peers/step.py speculators --loss eager        # fused did not compile in minutes on torch 2.11
    python recipes/peers/step.py specforge [--liger]
    python recipes/peers/step.py specforge --tiny                # anywhere, to see that it runs

Needs that package beside draftsmith (`pip install --no-deps speculators==0.9.0` or `specforge==0.2.0`, and what
their imports ask for). Prints one JSON object: seconds a step (median), block tokens/s, peak memory, first step.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WARM_UP = 3
FULL = {
    "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 5, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 248320, "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "use_sliding_window": False,
    "sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
}  # fmt: skip
TINY = {**FULL, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512}  # fmt: skip
TAPS, BLOCK = [1, 16, 31, 46, 61], 16
Step = Callable[[], Tensor]


def main() -> None:
    """Warm up, measure, print."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("peer", choices=("speculators", "specforge"))
    parser.add_argument("--loss", default="eager", choices=("eager", "fused"))
    parser.add_argument("--attention", help="flex (default on a GPU) or sdpa")
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    if args.tiny:
        args.tokens, args.anchors = 256, 16
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    build = speculators if args.peer == "speculators" else specforge
    step = build(args, TINY if args.tiny else FULL, device)
    step()
    wait(device)
    first_s = time.monotonic() - begun
    for _ in range(WARM_UP - 1):
        step()
    wait(device)
    took, losses = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(args.steps):
        started = time.monotonic()
        losses.append(step())
        wait(device)
        took.append(time.monotonic() - started)
    seconds = statistics.median(took)
    result = {
        **vars(args), "step_s": seconds, "block_tokens_per_s": args.anchors * BLOCK / seconds,
        "first_step_s": first_s, "losses": [float(x) for x in (losses[0], losses[-1])],
    }  # fmt: skip
    if device.type == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / (1 << 30)
    print(json.dumps(result))


def wait(device: torch.device) -> None:
    """Until the device has done all."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def row(args: argparse.Namespace, shape: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    """One sequence, all of it supervised."""
    H, N = shape["hidden_size"], args.tokens
    return {
        "hidden_states": torch.randn(1, N, len(TAPS) * H, device=device, dtype=torch.bfloat16),
        "input_ids": torch.randint(shape["vocab_size"], (1, N), device=device),
        "loss_mask": torch.ones(1, N, dtype=torch.long, device=device),
    }


def fill(*matrices: nn.Parameter) -> None:
    """Random weights of the target, frozen."""
    for matrix in matrices:
        matrix.requires_grad_(False)
        matrix.data.normal_(std=0.02)


def speculators(args: argparse.Namespace, shape: dict[str, Any], device: torch.device) -> Step:
    """Its compiled forward under autocast, clip, AdamW: train/trainer.py."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    layers = Qwen3Config(**shape, layer_types=["full_attention"] * shape["num_hidden_layers"])
    flex = "simple_flex_attention" if device.type == "cuda" else "sdpa"
    layers._attn_implementation = "sdpa" if args.attention == "sdpa" else flex
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers, draft_vocab_size=shape["vocab_size"], block_size=BLOCK,
        aux_hidden_state_layer_ids=[tap + 1 for tap in TAPS], mask_token_id=1,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash", default_proposal_method="greedy",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            verifier=VerifierConfig(name_or_path="random", architectures=["Qwen3ForCausalLM"]),
        ),
    )  # fmt: skip
    DFlashDraftModel.load_verifier_weights = lambda self: None
    with device:
        model = DFlashDraftModel(config)
    fill(model.embed_tokens.weight, model.lm_head.weight, model.verifier_lm_head.weight)
    kwargs, _ = DFlashDraftModel.get_trainer_kwargs(
        loss_fn="ce",
        loss_implementation=args.loss,
        max_anchors=args.anchors,
        dflash_decay_gamma=7.0,
    )
    batch = row(args, shape, device)
    batch["document_ids"] = torch.zeros(1, args.tokens, dtype=torch.long, device=device)
    H = shape["hidden_size"]
    batch["verifier_last_hidden_states"] = batch["hidden_states"][..., :H]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=6e-4)

    def step() -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            _, loss, _ = model(**batch, **kwargs)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def specforge(args: argparse.Namespace, shape: dict[str, Any], device: torch.device) -> Step:
    """bf16 weights with fp32 masters (optimizer.py), the loss in chunks of blocks."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.optimizer import BF16Optimizer
    from transformers import Qwen3Config

    flex = "flex_attention" if device.type == "cuda" else "sdpa"
    attention = "sdpa" if args.attention == "sdpa" else flex
    config = Qwen3Config(
        **shape, layer_types=["full_attention"] * shape["num_hidden_layers"], block_size=BLOCK,
        num_target_layers=64, dflash_config={"mask_token_id": 1, "target_layer_ids": TAPS},
    )  # fmt: skip
    config._attn_implementation = attention
    options = {}
    if args.liger:
        from specforge.modeling.draft.dflash_kernels import load_liger_dflash_kernels

        options["dflash_kernels"] = load_liger_dflash_kernels()
    with device:
        draft = DFlashDraftModel(config, **options).to(torch.bfloat16)
        embedding = nn.Embedding(shape["vocab_size"], shape["hidden_size"]).to(torch.bfloat16)
        head = nn.Linear(shape["hidden_size"], shape["vocab_size"], bias=False).to(torch.bfloat16)
    fill(embedding.weight, head.weight)
    model = OnlineDFlashModel(
        draft, head, embedding, mask_token_id=1, block_size=BLOCK, attention_backend=attention,
        num_anchors=args.anchors, loss_decay_gamma=7.0,
    )  # fmt: skip
    batch = row(args, shape, device)
    optimizer = BF16Optimizer(draft, lr=6e-4, total_steps=1000, max_grad_norm=1.0)

    def step() -> Tensor:
        loss, _, _ = model(**batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


if __name__ == "__main__":
    main()

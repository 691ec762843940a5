"""The model card of an export: what it drafts for, what it was trained on and how, what it measured,
how to serve it.
"""

import json
from pathlib import Path
from typing import Any

from draftsmith import __version__
from draftsmith.config import RunConfig
from draftsmith.drafter.config import DrafterShape
from draftsmith.report import same_text
from draftsmith.target.load import TargetInfo

CARD = """\
---
base_model: {target}
pipeline_tag: text-generation
tags: [speculative-decoding, dflash, draftsmith]
---

# DFlash drafter for {target}

A drafter for speculative decoding ([DFlash](https://arxiv.org/abs/2602.06036)): it proposes blocks of
{block_size} tokens from the hidden states of its target, which verifies them; the target's text does not
change. It is no language model by itself: embedding and lm_head are the target's.

| | |
|---|---|
| target | `{target}`, revision `{revision}`, {num_target_layers} layers, weights `{weights_digest}` |
| taps | raw outputs of the target's 0-based layers {taps} (vLLM's and speculators' aux ids {aux_ids}) |
| layers | {num_layers} ({layer_types}), hidden size {hidden_size} |
| block | {block_size}: the anchor and {num_drafts} drafted tokens; mask token {mask_token_id} |
| data | {data} |
| training | {steps} steps, {recipe} |
| made with | draftsmith {version} |

## Serving

```sh
{vllm}vllm serve {target} --speculative-config \\
    '{{"method": "dflash", "model": "THIS_FOLDER", "num_speculative_tokens": {num_drafts}}}'

python -m sglang.launch_server --model {target} --speculative-algorithm DFLASH \\
    --speculative-draft-model-path THIS_FOLDER --speculative-num-draft-tokens {block_size}
```
{mixed}
{thinking}

## Measured

{measured}

## Licence

These weights were trained on hidden states and on text of the target: the target's licence applies to
what may be done with them, beside the licences of the prompts above. Set `license:` in the head of this
card before you publish it.
"""
MIXED = """
This drafter mixes sliding and full layers: vLLM needs its V2 model runner for that
(`VLLM_USE_V2_MODEL_RUNNER=1`).
"""


def render(
    cfg: RunConfig,
    info: TargetInfo,
    shape: DrafterShape,
    counts: dict[str, Any],
    trained: dict[str, Any],
    report: dict[str, Any] | None,
) -> str:
    """README.md. `counts` are the token stage's, `trained` the train stage's; `report` is evaluate's
    report.json, if there is one.
    """
    mixed = len(set(shape.layer_types)) > 1
    sources = ", ".join(f"{Path(source.path).name}" for source in cfg.prepare.sources)
    whose = (
        "answered by the target itself, greedily" if cfg.regenerate.enabled else "answers as given"
    )
    train = cfg.train
    weights = f"slots weighed by {'D-PACE' if train.weights == 'dpace' else f'gamma {train.gamma}'}"
    return CARD.format(
        target=info.name,
        revision=info.revision,
        num_target_layers=info.num_layers,
        weights_digest=info.weights_digest[:16],
        taps=list(shape.taps),
        aux_ids=[tap + 1 for tap in shape.taps],
        num_layers=shape.num_layers,
        layer_types=", ".join(sorted(set(shape.layer_types))),
        hidden_size=shape.hidden_size,
        block_size=shape.block_size,
        num_drafts=shape.block_size - 1,
        mask_token_id=shape.mask_token_id,
        data=f"{counts.get('train', 0):,} conversations from {sources}; {whose}; "
        f"{counts.get('supervised_tokens', 0):,} supervised tokens{_stored(counts, trained)}",
        steps=f"{trained['steps']:,}",
        recipe=f"{train.tokens_per_step} tokens each, {train.epochs} epochs, AdamW {train.lr}, "
        f"{train.anchors_per_sample} anchors a sample, {weights}, seed {cfg.train_seed}"
        + (f"; started from {cfg.drafter.init_from}" if cfg.drafter.init_from else ""),
        version=__version__,
        vllm="VLLM_USE_V2_MODEL_RUNNER=1 " if mixed else "",
        mixed=MIXED if mixed else "",
        thinking=_template_note(cfg.tokenize.template_kwargs),
        measured=_table(report) if report else "Not measured.",
    )


def _stored(counts: dict[str, Any], trained: dict[str, Any]) -> str:
    """With features.max_bytes, fewer samples were learnt from."""
    used, of = trained["samples"], counts.get("train", 0)
    return "" if used == of else f"; of these, the {used:,} conversations whose features were kept"


def _template_note(template_kwargs: dict[str, Any]) -> str:
    if not template_kwargs:
        return "Trained on the target's chat template as it is."
    return (
        f"Trained with the chat template's variables `{json.dumps(template_kwargs)}`: send the same "
        "(`chat_template_kwargs`), other prompts are accepted less."
    )


def _table(report: dict[str, Any]) -> str:
    suite = report["suites"][0]
    settings = report["settings"]
    rows = [
        f"{suite['num_prompts']} held-out prompts, greedy, {settings['compute_dtype']}, "
        f"{settings['device']}, in draftsmith's own loop. tau is tokens emitted per target call.",
        "",
        "| method | tau | 95% interval | survival by slot | identical text |",
        "|---|---|---|---|---|",
    ]
    for name, m in suite["methods"].items():
        low, high = m["tau_ci95"]
        survival = " ".join(f"{x:.2f}" for x in m["survival"]) if name != "ar" else "-"
        rows.append(
            f"| {name} | {m['tau_pooled']:.2f} | {low:.2f}-{high:.2f} | {survival} "
            f"| {same_text(m, suite['num_prompts'])} |"
        )
    return "\n".join(rows)

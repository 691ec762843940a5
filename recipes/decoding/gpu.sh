#!/bin/sh
# What decoding costs on this GPU: the kernels against the torch rule, then a round at Qwen3.6-27B's size
# (random weights, context 2k) for trees of 16, 32, 64 and 65 nodes (65: tree_budget 64 with its root).
#
#     sh recipes/decoding/gpu.sh OUT
set -e
mkdir -p "$1"
python -m pytest tests/unit/test_gdn_triton.py -m gpu
for nodes in 16 32 64 65; do
    draftsmith bench decode --model qwen3.6-27b --context 2048 --tree-nodes $nodes --json >"$1/nodes-$nodes.json"
done
draftsmith bench decode --model qwen3.6-27b --context 2048

#!/usr/bin/env bash
# One machine, all its GPUs: what it will take, what will work here, and the run, which looks after itself.
#   recipes/cluster/one-node.sh CONFIG [--section.key VALUE ...]
set -euo pipefail
config=${1:?usage: one-node.sh CONFIG [--section.key VALUE ...]}
shift
draftsmith="${PYTHON:-.venv/bin/python} -m draftsmith.cli"
$draftsmith doctor "$config" "$@"
$draftsmith run "$config" "$@" --detach
run=$(sed -n 's/^run: *\([^ #]*\).*/\1/p' "$config")
echo "draftsmith watch $run      # or: status $run, stop $run"

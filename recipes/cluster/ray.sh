#!/usr/bin/env bash
# A Ray cluster: target's answers (in process) and features on all its GPUs, then training on one node's.
# Draftsmith is installed on every node; CONFIG and `run:` lie where every node sees them, by absolute paths.
#   recipes/cluster/ray.sh http://HEAD:8265 /shared/CONFIG [--section.key VALUE ...]
# GPUS (default 8; 0: CPU) are those of the node that trains; REGENERATE= (empty) with --regenerate.enabled false
# keeps the data's answers. Each job's log is shown; after any end the same command goes on.
set -euo pipefail
address=${1:?usage: ray.sh http://HEAD:8265 CONFIG [--section.key VALUE ...]}
config=${2:?usage: ray.sh http://HEAD:8265 CONFIG [--section.key VALUE ...]}
shift 2
gpus=${GPUS:-8}

job() { # options of the job, --, a stage
    "${RAY:-ray}" job submit --address "$address" "${@:1:$#-1}" \
        python -m draftsmith.cli "${@: -1}" "$config" --engine.kind ray --engine.address auto "${overrides[@]}"
}

overrides=("$@")
for stage in prepare ${REGENERATE-regenerate} tokenize extract; do
    job -- "$stage"
done
for stage in train evaluate export; do
    job --entrypoint-num-gpus "$gpus" -- "$stage"
done

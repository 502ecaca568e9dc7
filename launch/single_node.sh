#!/usr/bin/env bash
# All three stages on every GPU of this machine, or on the first NUM_GPUS; further flags are
# passed on, and win:
#   launch/single_node.sh --actor-model facebook/opt-1.3b --data Dahoas/rm-static --output-dir output
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
rlhf="${RLHF:-$here/.venv/bin/rlhf}"
processes=()
[ -z "${NUM_GPUS:-}" ] || processes=(--set "deployment.num_processes=$NUM_GPUS")
exec "$rlhf" train --deployment-type single_node ${processes[@]+"${processes[@]}"} "$@"

#!/usr/bin/env bash
# All three stages on one GPU; further flags are passed on, and win:
#   launch/single_gpu.sh --actor-model facebook/opt-1.3b --data Dahoas/rm-static --output-dir output
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
rlhf="${RLHF:-$here/.venv/bin/rlhf}"
exec "$rlhf" train --deployment-type single_gpu "$@"

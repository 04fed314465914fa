#!/usr/bin/env bash
# Measures a whole curve and draws it; the same command again goes on where it was.
#
#   bash examples/sweep/run_sweep.sh decode  TAG CONTEXT [NEXTN ACCEPTANCE]
#   bash examples/sweep/run_sweep.sh prefill TAG CONTEXT
#   bash examples/sweep/run_sweep.sh encoder TAG [IMAGE_SIZE]
#
# Ranges and sizes for a small model are variables: see examples/sweep/sweep.py.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
exec "${PYTHON:-python}" "$root/examples/sweep/sweep.py" "$@"

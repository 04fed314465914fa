#!/usr/bin/env bash
# The request of every example here, with curl: once whole, once as a stream of events.
#   TANDEM_URL=http://127.0.0.1:8100 examples/curl.sh
set -euo pipefail
url=${TANDEM_URL:-http://127.0.0.1:8100}
ask() {
  curl --silent --show-error --fail-with-body --no-buffer "$url/v1/completions" \
    -H 'content-type: application/json' \
    -H "authorization: Bearer ${TANDEM_API_KEY:-none}" \
    -d "{\"prompt\": \"def add(a, b):\", \"max_tokens\": 16, \"temperature\": 0, \"stream\": $1}"
  echo
}
ask false
ask true

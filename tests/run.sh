#!/usr/bin/env bash
# All tests that need no accelerator, from a bare machine: environments first, then each area in its own.
#
# usage: run.sh [PYTHON3.11]        OVERLAY_CACHE: where environments, sources and the checkpoint are kept
set -euo pipefail
cd "$(dirname "$0")/.."
export OVERLAY_CACHE=${OVERLAY_CACHE:-$HOME/.cache/vllm-overlay}
python=$(tests/testbeds/make_env.sh "$@")
PYTHON=$python tests/testbeds/fetch_sources.sh
ascend=$(PATH="$(dirname "$python"):$PATH" tests/testbeds/make_ascend_env.sh | tail -1)
started=$SECONDS
status=0
export OMP_NUM_THREADS=1
# Booting servers is one core's work: they go beside everything else.
served=$(mktemp)
"$python" -m pytest -q --durations 12 tests/serve >"$served" 2>&1 &
beside=$!
"$python" -m pytest -q --durations 12 --ignore tests/ascend --ignore tests/serve tests || status=$?
"$ascend" -m pytest -q --durations 5 tests/ascend || status=$?
wait $beside || status=$?
cat "$served"
rm -f "$served"
echo "tests took $((SECONDS - started)) s"
exit $status

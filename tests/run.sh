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
# Two streams on two cores, of about the same length: these areas and the Ascend environment go beside everything else.
areas=(serve gemm facts)
log=$(mktemp)
(
    beside=0
    "$python" -m pytest -q --durations 12 "${areas[@]/#/tests/}" || beside=$?
    "$ascend" -m pytest -q --durations 5 tests/ascend || beside=$?
    exit $beside
) >"$log" 2>&1 &
"$python" -m pytest -q --durations 12 --ignore tests/ascend "${areas[@]/#/--ignore=tests/}" tests || status=$?
wait $! || status=$?
cat "$log"
rm -f "$log"
echo "tests took $((SECONDS - started)) s"
exit $status

#!/usr/bin/env bash
# Fetch, once, the Python sources of the vLLM releases that patches are fingerprinted against, into the cache folder.
#
# usage: fetch_sources.sh [VERSION ...]
set -euo pipefail
cache=${OVERLAY_CACHE:-$HOME/.cache/vllm-overlay}/src
python=${PYTHON:-python3}
versions=("$@"); [ $# -gt 0 ] || versions=(0.18.1 0.23.0 0.26.0 0.28.0 0.32.0 0.33.0)
mkdir -p "$cache"
exec 9>"$cache/.lock"
flock 9
platforms=(); for p in manylinux_2_28 manylinux_2_31 manylinux_2_35 manylinux2014 manylinux1; do platforms+=(--platform "${p}_$(uname -m)"); done
for version in "${versions[@]}"; do
    [ -d "$cache/vllm-$version" ] && continue
    echo "fetching vLLM $version's sources" >&2
    work=$(mktemp -d "$cache/.fetch-XXXXXX")
    "$python" -m pip download -qq --no-deps --only-binary :all: --python-version 3.12 --implementation cp \
        --abi cp38 --abi abi3 --abi none "${platforms[@]}" -d "$work" "vllm==$version"
    "$python" - "$work" <<'PY'
import sys, zipfile
from pathlib import Path
work = Path(sys.argv[1])
with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
    wheel.extractall(work / "tree", [n for n in wheel.namelist() if n.endswith(".py") or ".dist-info/" in n])
PY
    mv "$work/tree" "$cache/vllm-$version"
    rm -rf "$work"
done

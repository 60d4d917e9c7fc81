#!/usr/bin/env bash
# Make the environment in which the real vllm-ascend 0.23.0 imports and runs on a CPU (see npu_on_cpu/).
#
#   tests/testbeds/make_ascend_env.sh          prints the environment's Python as its last line
#
# It lives under $OVERLAY_CACHE (default ~/.cache/vllm-overlay) and is made again only when this script or the pinned
# requirements change. Everything comes from PyPI.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${OVERLAY_CACHE:-$HOME/.cache/vllm-overlay}
target=$cache/ascend-env
sources=$cache/src
stamp=$(cat "$here/make_ascend_env.sh" "$here/requirements-ascend.txt" | sha256sum | cut -d' ' -f1)

# unpack PROJECT VERSION FILTER...: a wheel's files that match into $sources/PROJECT-VERSION, whole or not at all
unpack() {
    local name=$1 version=$2 folder=$sources/$1-$2
    shift 2
    [ -d "$folder" ] && return 0
    local work
    work=$(mktemp -d "$cache/unpack.XXXXXX")
    echo "downloading the wheel of $name $version" >&2
    "$python" -m pip download -qq --no-deps --only-binary=:all: --dest "$work" "$name==$version" >&2
    "$python" - "$work" "$@" <<'PY'
import fnmatch, pathlib, sys, zipfile

work, *patterns = sys.argv[1:]
(wheel,) = pathlib.Path(work).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    names = [n for n in archive.namelist() if any(fnmatch.fnmatch(n, p) for p in patterns)]
    archive.extractall(f"{work}/tree", names)
PY
    mkdir -p "$sources"
    mv "$work/tree" "$folder" 2>/dev/null || [ -d "$folder" ]
    rm -rf "$work"
}

if [ "$(cat "$target/.stamp" 2>/dev/null)" != "$stamp" ]; then
    echo "making $target" >&2
    rm -rf "$target"
    mkdir -p "$cache"
    ${PYTHON311:-python3.11} -m venv "$target"
    "$target/bin/python" -m pip install -qq --disable-pip-version-check --no-deps -r "$here/requirements-ascend.txt" >&2
fi
python=$target/bin/python
unpack vllm 0.23.0 'vllm/*.py' 'vllm-*.dist-info/*'
unpack vllm-ascend 0.23.0 'vllm_ascend/*.py' 'vllm_ascend-*.dist-info/*'

# On the path through a .pth file: the testbed's own stand-ins first, then both trees.
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n' "$here/npu_on_cpu" "$sources/vllm-0.23.0" "$sources/vllm-ascend-0.23.0" > "$site/ascend-testbed.pth"
echo "$stamp" > "$target/.stamp"
echo "$python"

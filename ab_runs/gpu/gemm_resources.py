"""Registers, spills and shared memory of a table's kernels, from the compiler's own report. Needs no GPU.

    python ab_runs/gpu/gemm_resources.py TABLE.json OUT.json

Compiles for the table's NVIDIA architecture with the Triton that is installed and reads ``cuobjdump --dump-resource-usage``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from patches._lib.gemm import kernels, table

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compiled(kernel: Any, arguments: dict[str, Any], pointers: dict[str, str], capability: int) -> dict[str, Any]:
    """Registers, stack and local bytes a thread, static and pipelined shared memory a program, of one kernel."""
    options = {name: arguments[name] for name in ("num_warps", "num_stages")}
    constants = {name: value for name, value in arguments.items() if name in kernel.arg_names}
    signature, attributes = {}, {}
    for at, name in enumerate(kernel.arg_names):
        other = "fp32" if name == "eps" else "i32"
        signature[name] = "constexpr" if name in constants else pointers.get(name, other)
        if signature[name] not in ("constexpr", "fp32") and name != "M":
            attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        text = subprocess.run([TOOL, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    ptx = made.asm["ptx"]
    unit = "wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else "fma"
    return {
        "registers": int(found[1]), "stack_bytes": int(found[2]), "local_bytes": int(found[3]),
        "shared_bytes": made.metadata.shared, "unit": unit,
    }  # fmt: skip


Job = tuple[str, table.Tile, str, int, int, int, bool]  # what, tile, dtype, m, n, k, gated


def jobs(found: table.Table) -> list[Job]:
    """Every kernel of the table: plain products, both of each MLP, products with their norm."""
    made: list[Job] = [("product", e.tile, e.dtype, e.m, e.n, e.k, False) for e in found.entries.values()]
    for mlp in found.mlps.values():
        made.append(("gated product", mlp.first, mlp.dtype, mlp.m, 2 * mlp.inner, mlp.hidden, True))
        if mlp.second is not None:
            made.append(("second product", mlp.second, mlp.dtype, mlp.m, mlp.hidden, mlp.inner, False))
    both = (*found.normed.values(), *found.normed_mlps.values())
    return made + [("product with norm", e.tile, e.dtype, e.m, e.n, e.k, e.gated) for e in both]


def resources(job: Job, capability: int) -> dict[str, Any]:
    what, tile, dtype, m, n, k, gated = job
    half = {"bfloat16": "*bf16", "float16": "*fp16"}[dtype]
    if what == "product with norm":
        pointers = dict.fromkeys(("x", "residual", "gamma", "w", "y", "kept"), half)
        return compiled(kernels._normed_rows, kernels._normed_arguments(tile, m, n, k, gated), pointers, capability)
    kernel, arguments = kernels._specialise(tile, m, n, k, False, gated)
    arguments = arguments | {"bias": None}
    if tile.kernel != "rows":
        arguments.pop("M")
    pointers = {"x": half, "w": half, "y": half, "part": half if tile.split == 1 else "*fp32"}
    return compiled(kernel, arguments, pointers, capability)


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    found = table.load(source)
    done: dict[Any, dict[str, Any]] = {}
    for job in jobs(found):
        what, tile, dtype, m, n, k, gated = job
        rows = m if tile.kernel == "rows" else 0
        key = (tile, rows, n % tile.bn == 0, k % tile.span == 0, gated, what == "product with norm", dtype)
        if key not in done:
            used = {"what": what, "first_used_for": [dtype, m, n, k]}
            done[key] = {"tile": str(tile), **used, **resources(job, int(found.arch[2:]))}
    lines = ",\n ".join(json.dumps(value) for value in done.values())
    target.write_text('{"triton": "' + triton.__version__ + '", "kernels": [\n ' + lines + "\n]}\n")
    spills = [value for value in done.values() if value["local_bytes"] or value["stack_bytes"]]
    most = max(value["registers"] for value in done.values())
    print(f"{len(done)} kernels, at most {most} registers, {len(spills)} with spills or a stack")


if __name__ == "__main__":
    main()

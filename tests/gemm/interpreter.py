"""Kernels in Triton's interpreter, in a process of their own: the interpreter is chosen when Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support import ROOT


def output(script: str, *arguments: str) -> list[str]:
    """The lines that a Python script prints, run on the CPU with Triton's interpreter."""
    environment = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()

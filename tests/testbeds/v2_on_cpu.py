"""The real V2 model runner on a machine without a GPU: its Triton kernels run in Triton's interpreter.

Import before torch, Triton or vLLM, in a process of its own: whether a kernel is interpreted is decided when it is
defined. vLLM asks Triton for an active backend (``vllm.triton_utils.importing``); a stand-in named ``cpu`` answers.
What the interpreter cannot do: top-k and top-p sampling. What it is taught here: integer masks, which compiled Triton
takes as truth values (the V2 runner's n-gram drafts use one).
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import numpy as np  # noqa: E402 - after the environment
from triton.backends import backends  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

backends.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None))

_load, _store = interpreter.InterpreterBuilder.create_masked_load, interpreter.InterpreterBuilder.create_masked_store


def _masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
    mask.data = mask.data.astype(np.bool_)
    return _load(self, pointers, mask, *rest)


def _masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
    mask.data = mask.data.astype(np.bool_)
    return _store(self, pointers, value, mask, *rest)


interpreter.InterpreterBuilder.create_masked_load = _masked_load
interpreter.InterpreterBuilder.create_masked_store = _masked_store

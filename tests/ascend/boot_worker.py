"""Run by ``test_bootstrap`` in an interpreter of its own, under the real bootstrap: a worker as vllm-ascend makes it.

The order is a worker's: vLLM, its platform, the platform's patches, the worker class, its __init__ with the worker's
patches and the customs ops, then a model runner. Prints one line of JSON.
"""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path


def main() -> None:
    assert not any(name.startswith("vllm_ascend") for name in sys.modules)
    sys.path[:0] = [str(Path(__file__).resolve().parent)]
    stock_import = builtins.__import__

    import torch
    import torch_npu  # noqa: F401
    import vllm.utils.torch_utils as torch_utils

    register = torch_utils.direct_register_custom_op
    torch_utils.direct_register_custom_op = lambda *args, **kwargs: register(*args, **{**kwargs, "dispatch_key": "CPU"})
    import vllm.config  # noqa: F401
    import vllm_ascend.ops  # noqa: F401
    from vllm_ascend import utils

    utils.adapt_patch(is_global_patch=True)
    import ascend_world
    import replay
    from vllm.config import set_current_vllm_config
    from vllm_ascend.ops.triton import triton_utils
    from vllm_ascend.worker.worker import NPUWorker

    triton_utils._NUM_AICORE, triton_utils._NUM_VECTORCORE = 24, 48
    config = replay.make_config(speculation=True)
    before = {name: state["state"] for name, state in _receipt()["patches"].items()}
    import torch_npu.op_plugin.atb._atb_ops  # noqa: F401
    import vllm_ascend.worker.worker as worker_module

    worker_module.check_ascend_device_type = lambda: None  # compares the wheel's chip with npu-smi's
    with set_current_vllm_config(config):
        ascend_world._single_rank_groups()
        worker = NPUWorker(config, local_rank=0, rank=0, distributed_init_method="unused")
        after = {name: state["state"] for name, state in _receipt()["patches"].items()}
        runner = worker_module.NPUModelRunner(config, torch.device("npu:0"))
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    print(
        json.dumps(
            {
                "before": before,
                "after": after,
                "requires": [],
                "receipt": _receipt(),
                "worker": type(worker).__name__,
                "buffer": type(runner.req_indices).__name__,
                "import replaced": builtins.__import__ is not stock_import,
                "import by": getattr(builtins.__import__, "__module__", ""),
                "views": getattr(QwenGatedDeltaNetAttention.rearrange_mixed_qkv, "__overlay_patch__", None),
            }
        )
    )


def _receipt() -> dict:
    from overlay import hooks

    return hooks.ARMED.receipt.content


main()

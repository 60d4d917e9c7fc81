"""Brings up the real vllm-ascend 0.23.0 on CPU tensors, once a process."""

from __future__ import annotations

import functools
import types
from typing import Any


@functools.cache
def load() -> types.SimpleNamespace:
    """Import vllm_ascend as its worker does, with the patch chains of the platform and of the worker.

    Custom operators are registered for the CPU, where the tensors are. Returns the modules that the tests use.
    """
    import torch
    import torch_npu  # noqa: F401 - the stand-in; before anything of vLLM
    import vllm.utils.torch_utils as torch_utils

    register = torch_utils.direct_register_custom_op

    @functools.wraps(register)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        return register(*args, **{**kwargs, "dispatch_key": "CPU"})

    torch_utils.direct_register_custom_op = on_cpu
    torch.set_num_threads(1)

    import vllm.config
    import vllm_ascend.ops  # noqa: F401 - before its attention and worker modules (circular imports)
    from vllm_ascend import ascend_config, utils
    from vllm_ascend.ops.triton import triton_utils

    utils.adapt_patch(is_global_patch=True)
    utils.adapt_patch()
    import vllm_ascend.ops.register_custom_ops  # noqa: F401

    triton_utils._NUM_AICORE, triton_utils._NUM_VECTORCORE = 24, 48
    config = vllm.config.VllmConfig()
    config.additional_config = {}
    ascend_config.init_ascend_config(config)
    _single_rank_groups()
    return types.SimpleNamespace(vllm_config=config)


def _single_rank_groups() -> None:
    """Real coordinators of one rank, over gloo: tensor, pipeline, and both kinds of context parallelism."""
    import tempfile

    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    store = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115 - it lives as long as the process
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{store.name}", backend="gloo"
        )
        parallel_state.initialize_model_parallel(backend="gloo")

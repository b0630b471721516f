"""vLLM's way to load weights into a model that runs: layers were packed after the first loading, and are packed anew."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollout_spec_rl.vllm.checkpoint_files import NamedTensor


def load_into(model: Any, tensors: Iterable[NamedTensor], vllm_config: Any, model_config: Any) -> None:
    """model: vLLM's, of model_config. Tensors have the checkpoint's names."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

    with set_current_vllm_config(vllm_config):
        initialize_layerwise_reload(model)
        model.load_weights(iter(tensors))
        finalize_layerwise_reload(model, model_config)
        # An output head that is tied to the embedding has its weight by now, but nothing was loaded into it: it kept the old one packed.
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

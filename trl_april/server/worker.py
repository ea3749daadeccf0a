"""Worker extension: code that runs in the workers of the vLLM server, added by vLLM's `--worker-extension-cls`."""

from __future__ import annotations

import logging
from typing import Any

import torch

from .shared_memory import identity, opened


RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"


class WeightLoader:
    """Methods for `/collective_rpc` that load weights from memory shared by the trainer.

    The class also silences a warning of every weight sync: vLLM counts the tables of rotary embeddings as weights that
    failed to load. They are computed from the configuration, and no checkpoint has them.
    """

    april_is_loading = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        logging.getLogger(RELOAD_LOGGER).addFilter(_concerns_weights)
        return super().__new__(cls)

    def april_device(self: Any) -> str:
        """Return the physical device of this worker."""
        return identity(self.device)

    def april_load(self: Any, handle: Any, entries: Any, *, first: bool = False, last: bool = False) -> None:
        """Load some of the weights, in checkpoint format, from shared memory (see [`opened`]).

        `first` and `last` mark the first and last call of a sync, during which the server must be paused. A call
        without tensors and without these marks only opens the memory, as a trial.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        tensors = opened(handle, entries, self.device)
        if not (first or self.april_is_loading) and (entries or last):
            raise ValueError("The first weights of this sync have not been loaded: was the server restarted?")
        runner = self.model_runner
        model = runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            if first:
                if self.april_is_loading:  # a sync that failed
                    finalize_layerwise_reload(model, runner.model_config)
                initialize_layerwise_reload(model)
                self.april_is_loading = True
            # vLLM keeps tensors until their layer is complete, and the trainer overwrites this memory.
            model.load_weights((name, tensor.clone()) for name, tensor in tensors)
            if last:
                finalize_layerwise_reload(model, runner.model_config)
                self.april_is_loading = False
                # As in vLLM's `reload_weights`.
                runner.reset_lora_state()
                runner.reset_encoder_cache()
                runner.reset_mm_cache()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def _concerns_weights(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not ("RotaryEmbedding: " in message and message.endswith(": Failed to load weights"))

"""Code that runs inside the workers of the vLLM server, added through vLLM's own option `--worker-extension-cls`."""

from __future__ import annotations

import logging
from typing import Any


RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"


class QuietReload:
    """Keeps one warning of every weight sync out of the server's log.

    vLLM counts the tables of rotary embeddings as weights and warns that they failed to load. They are computed from
    the model's configuration, and no checkpoint has them. The same warning of any other layer stays.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        logging.getLogger(RELOAD_LOGGER).addFilter(_is_not_of_a_table)
        return super().__new__(cls)


def _is_not_of_a_table(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not ("RotaryEmbedding: " in message and message.endswith(": Failed to load weights"))

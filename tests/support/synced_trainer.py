"""The part of a trainer that a weight sync needs: a model and its policy version."""

from collections.abc import Callable

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_april.distributed.processes import OneProcess
from trl_april.weights.canary import server_logprobs, trainer_logprobs
from trl_april.weights.sync import ServerGeneration


def sync_in_steps(generation: ServerGeneration, quiesce: Callable[[], object]) -> None:
    """Sync the weights, with `quiesce` as the step of the caller."""
    with generation.sync() as sync:
        quiesce()
        sync.load()
        sync.verify()


class SyncedTrainer:
    """A model whose weights `change` in steps."""

    def __init__(self, model_dir: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.step = 0

    def connect(self, server, **options) -> ServerGeneration:
        defaults = {"weight_sync": "auto", "weight_sync_dir": None, "needs_logprobs": True, "api_key": None}
        return ServerGeneration(
            policy_version=lambda: self.step, model=self.model, trained_model=lambda: self.model,
            processing_class=self.tokenizer, server_base_url=server.base_url, max_completion_length=64,
            **{"accelerator": Accelerator(cpu=True), "processes": OneProcess(), **defaults, **options},
        )  # fmt: skip

    def change(self, scale: float) -> None:
        generator = torch.Generator().manual_seed(self.step + 1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += scale * torch.randn(parameter.shape, generator=generator)
        self.step += 1

    def distance(self, generation: ServerGeneration) -> float:
        """Largest difference of log-probabilities between server and trainer, on other tokens than the canary's."""
        token_ids = list(range(4, 80))
        ours = torch.tensor(trainer_logprobs(self.model, token_ids, torch.device("cpu")))
        model = generation.server_info.model
        theirs = torch.tensor(server_logprobs(generation.server, model, token_ids))
        return float((ours - theirs).abs().max())

"""One training run of the demo, and what is recorded of it."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback, TrainerControl, TrainerState

from .. import APRILGRPOConfig, APRILGRPOTrainer
from . import task


@dataclass(slots=True)
class Recording:
    """
    What happened in one training run. All times are seconds since its start.

    Args:
        name (`str`):
            How the run is called in the table and in the picture.
        over_provisioning (`float`):
            The one option in which the runs differ.
        steps (`int`):
            Optimiser steps.
        seconds (`float`):
            Wall-clock of the whole run.
        rollout_seconds (`float`):
            The part of it in which completions were generated.
        sync_seconds (`float`):
            The part of it in which weights travelled to the server.
        generated_tokens (`int`):
            Tokens that the server sampled.
        trained_tokens (`int`):
            Tokens of the completions that were trained on.
        carried_tokens (`int`):
            Those of them that were sampled in an earlier round than the one that delivered them.
        staleness_mean (`float`):
            Mean age of a trained token in policy versions.
        staleness_max (`int`):
            Age of the oldest one.
        rewards (`list[tuple[float, float]]`):
            End of every step, and the mean reward of its batch.
        rounds (`list[tuple[float, float]]`):
            Beginning and end of every round of generation.
        in_flight (`list[tuple[float, float]]`):
            Requests that the server works on, at every change.
        reward_before (`float`):
            Reward on the held-out prompts before the run.
        reward_after (`float`):
            The same after the run.
        solved_before (`float`):
            Share of the held-out prompts answered without any mistake before the run.
        solved_after (`float`):
            The same after the run.
    """

    name: str
    over_provisioning: float
    steps: int
    seconds: float
    rollout_seconds: float
    sync_seconds: float
    generated_tokens: int
    trained_tokens: int
    carried_tokens: int
    staleness_mean: float
    staleness_max: int
    rewards: list[tuple[float, float]] = field(default_factory=list)
    rounds: list[tuple[float, float]] = field(default_factory=list)
    in_flight: list[tuple[float, float]] = field(default_factory=list)
    reward_before: float = 0.0
    reward_after: float = 0.0
    solved_before: float = 0.0
    solved_after: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The recording as what JSON can hold."""
        return asdict(self)


class StepClock(TrainerCallback):
    """Notes when every step ends and what reward its batch had."""

    def __init__(self, on_step: Callable[[int, float, float], None] | None = None) -> None:
        self.on_step = on_step
        self.started = 0.0
        self.rewards: list[tuple[float, float]] = []

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.started = time.monotonic()

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, float], **kwargs: Any
    ) -> None:
        if "reward" not in logs:  # the summary at the end
            return
        seconds = time.monotonic() - self.started
        self.rewards.append((seconds, logs["reward"]))
        if self.on_step is not None:
            self.on_step(state.global_step, seconds, logs["reward"])


def train(
    name: str,
    over_provisioning: float,
    *,
    model_dir: Path,
    dataset: Dataset,
    base_url: str,
    output_dir: Path,
    reward_funcs: Callable | list[Callable] = task.countdown_reward,
    on_step: Callable[[int, float, float], None] | None = None,
    make_trainer: Callable[..., APRILGRPOTrainer] = APRILGRPOTrainer,
    **options: Any,
) -> tuple[Recording, PreTrainedModel]:
    """
    Trains the model of a folder with GRPO.

    Args:
        name (`str`):
            Name of the recording.
        over_provisioning (`float`):
            1.0 for synchronous GRPO, more for APRIL.
        model_dir (`Path`):
            Folder of the model to begin with.
        dataset (`Dataset`):
            As made by [`task.training_dataset`].
        base_url (`str`):
            The vLLM server.
        output_dir (`Path`):
            Folder for what the trainer writes.
        reward_funcs (`Callable` or `list[Callable]`, *optional*, defaults to [`task.countdown_reward`]):
            The rewards, which add up.
        on_step (`Callable[[int, float, float], None]`, *optional*):
            Called after every step with its number, the seconds since the start and the mean reward.
        make_trainer (`Callable[..., APRILGRPOTrainer]`, *optional*, defaults to [`APRILGRPOTrainer`]):
            Makes the trainer from its arguments, for one that also records what it sees.
        **options:
            Further fields of [`APRILGRPOConfig`].

    Returns:
        The recording and the trained model.
    """
    clock = StepClock(on_step)
    args = APRILGRPOConfig(
        str(output_dir),
        over_provisioning=over_provisioning,
        vllm_server_base_url=base_url,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # the activations of a model of this size are small
        **options,
    )
    trainer = make_trainer(
        model=str(model_dir),
        reward_funcs=reward_funcs,
        args=args,
        train_dataset=dataset,
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)  # a dict of 40 entries per step
    trainer.round_history = deque()  # of all rounds
    trainer.train()
    seconds = time.monotonic() - clock.started

    logs = [entry for entry in trainer.state.log_history if "april/round_seconds" in entry]
    rounds = list(trainer.round_history)
    begins = [done.started - clock.started for done in rounds]
    trained = [round(entry["april/trained_tokens"]) for entry in logs]
    recording = Recording(
        name=name,
        over_provisioning=over_provisioning,
        steps=trainer.state.global_step,
        seconds=seconds,
        rollout_seconds=sum(done.seconds for done in rounds),
        sync_seconds=sum(entry["april/sync_seconds"] for entry in logs),
        generated_tokens=sum(done.generated_tokens for done in rounds),
        trained_tokens=sum(trained),
        carried_tokens=sum(done.carried_tokens for done in rounds),
        staleness_mean=sum(entry["april/staleness_mean"] * n for entry, n in zip(logs, trained, strict=True))
        / sum(trained),
        staleness_max=round(max(entry["april/staleness_max"] for entry in logs)),
        rewards=clock.rewards,
        rounds=[(begin, begin + done.seconds) for begin, done in zip(begins, rounds, strict=True)],
        in_flight=[
            (begin + offset, count)
            for begin, done in zip(begins, rounds, strict=True)
            for offset, count in [*done.in_flight, (done.seconds, 0)]
        ],
    )
    return recording, trainer.model

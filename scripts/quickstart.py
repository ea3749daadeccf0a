"""GRPO with partial rollouts in one file: a model, a dataset, a reward, and everything else by options.

    python scripts/quickstart.py --model path/or/model-id --dataset prompts.jsonl --output_dir out
    python scripts/quickstart.py --model ... --dataset ... --output_dir out --over_provisioning 1.0     # synchronous
    python scripts/quickstart.py ... --vllm_server_base_url http://127.0.0.1:8000    # a server that runs already

The dataset is a JSON-lines file with the columns `prompt` and `answer`, or the name of one that `load_dataset` knows.
Every field of APRILGRPOConfig, and so of TRL's GRPOConfig and of TrainingArguments, is an option.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset, load_dataset
from trl import TrlParser

from trl_april import APRILGRPOConfig, APRILGRPOTrainer, LocalServer


@dataclass
class ScriptArguments:
    """What the trainer's own options do not say."""

    model: str = field(metadata={"help": "Folder or id of the model to train."})
    dataset: str = field(metadata={"help": "JSON-lines file with the columns prompt and answer, or a dataset's name."})
    dataset_split: str = field(default="train", metadata={"help": "Split of a dataset given by name."})


def contains_answer(completions: list, answer: list, **kwargs) -> list[float]:
    """1.0 if the completion has the answer in it, else 0.0. Put your own rule here."""
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    return [float(str(right) in text) for text, right in zip(texts, answer, strict=True)]


def load(name: str, split: str) -> Dataset:
    """The rows of a JSON-lines file, or of a dataset by name."""
    if Path(name).is_file():
        return load_dataset("json", data_files=name, split="train")
    return load_dataset(name, split=split)


def main() -> None:
    script, config = TrlParser((ScriptArguments, APRILGRPOConfig)).parse_args_and_config()
    own_server = nullcontext() if config.vllm_server_base_url else LocalServer(script.model)
    with own_server as server:
        if server is not None:
            config.vllm_server_base_url = server.base_url
        trainer = APRILGRPOTrainer(
            model=script.model,
            reward_funcs=contains_answer,
            args=config,
            train_dataset=load(script.dataset, script.dataset_split),
        )
        trainer.train()
        trainer.save_model(config.output_dir)


if __name__ == "__main__":
    main()

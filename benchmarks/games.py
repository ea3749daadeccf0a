"""Training on a game of TextArena (https://github.com/LeonGuertler/TextArena) that is stopped and resumed half-way.

    python benchmarks/games.py                   # 5 seeds of 40 steps
    python benchmarks/games.py --quick           # a few steps, as a smoke test

GuessTheNumber-v0: a number from 1 to 20 in at most eleven guesses, with the environment of scripts/games.py and
default options. The model of 0.1 million parameters is warm-started on games of a player who follows the hints in half
of the moves and may give up, which gets no reward. Rewards are TextArena's, of the trained batches. A stopped
benchmark resumes.
"""

from __future__ import annotations

import random
import re
import runpy
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from countdown import build_model, save
from gym_tasks import PIECE, optimizer_step
from intervals import interval
from learning import prepare, training_parser
from report import earlier_results, markdown, write_json
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from trl_april import APRILGRPOConfig, APRILGRPOTrainer, LocalServer
from trl_april.pool.samples import SampleState


ROOT = Path(__file__).parents[1]
NAME, NUMBERS, GUESSES = "GuessTheNumber-v0", 20, 11  # the eleventh ends a game
GAMES = runpy.run_path(str(ROOT / "scripts" / "games.py"))
GIVES_UP, FOLLOWS_HINTS = 0.15, 0.5  # the player's probabilities per move
WARM_START_STEPS, WARM_START_BATCH, WARM_START_RATE = 400, 8, 4e-3
TRAINING_SEEDS = 10**6  # the warm start plays other games

Messages = list[dict[str, Any]]


def played(seed: int) -> tuple[Messages, Messages]:
    """A game of the warm start: its prompt, and what follows."""
    rng, game = random.Random(seed), GAMES["Game"](NAME)
    prompt = [{"role": "user", "content": "Play this game." + game.reset(seed=seed)}]
    low, high, tried, turns = 1, NUMBERS, set(), []
    while len(tried) < GUESSES and rng.random() >= GIVES_UP:
        first, last = (low, high) if rng.random() < FOLLOWS_HINTS else (1, NUMBERS)
        guess = rng.choice([one for one in range(first, last + 1) if one not in tried])
        tried.add(guess)
        call = {"name": "play", "arguments": {"move": f"[{guess}]"}}
        said = game.play(f"[{guess}]")
        turns += [
            {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "name": "play", "content": said},
        ]
        if "higher" in said:
            low = max(low, guess + 1)
        elif "lower" in said:
            high = min(high, guess - 1)
        else:
            break
    return prompt, [*turns, {"role": "assistant", "content": "Done."}]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with the words of the game and of its tool, single characters and digits, and Qwen3's template."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    markers = [f"<{end}{name}>" for name in ("tool_call", "tool_response", "think") for end in ("", "/")]
    template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    shell = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<unk>": 0}, "<unk>")), chat_template=template
    )
    tools = [GAMES["Game"](NAME).play]
    texts = [
        shell.apply_chat_template([*prompt, *turns], tools=tools, tokenize=False)
        for prompt, turns in map(played, range(20))
    ]
    pieces = sorted({*re.findall(PIECE, "".join(texts)), *map(chr, range(32, 127)), "\n"})
    vocabulary = {piece: index for index, piece in enumerate([*special, *markers, "<unk>", *pieces])}
    tokenizer = Tokenizer(WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in markers])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[2], unk_token="<unk>",
        padding_side="left", chat_template=template, model_max_length=2048, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def warm_start(model: Any, tokenizer: PreTrainedTokenizerFast, steps: int, template: str | None = None) -> None:
    """Train a model in place on games of the player, written with this template or else the tokenizer's."""
    tools = [GAMES["Game"](NAME).play]
    encode = partial(tokenizer.apply_chat_template, tools=tools, return_dict=False, chat_template=template)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_START_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, WARM_START_RATE, total_steps=steps, pct_start=0.2)
    model.train()
    for step in range(steps):
        examples = []
        for seed in range(step * WARM_START_BATCH, (step + 1) * WARM_START_BATCH):
            prompt, turns = played(seed)
            asked, ids = encode(prompt, add_generation_prompt=True), encode([*prompt, *turns])
            examples.append((len(asked), torch.tensor(ids)))
        ids = pad_sequence([one for _, one in examples], batch_first=True, padding_value=tokenizer.pad_token_id)
        labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)
        for row, (asked, _) in zip(labels, examples, strict=True):
            row[:asked] = -100
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer_step(model, optimizer, scheduler)
        if (step + 1) % 50 == 0:
            print(f"    warm start, step {step + 1} of {steps}, loss {loss.item():.3f}", flush=True)


class _Stop(transformers.TrainerCallback):
    """Stops a training after a step, with games in the pool. With fewer `max_steps` the pool would be empty."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.after


def training_args(folder: str | Path, base_url: str, **options: Any) -> APRILGRPOConfig:
    """Default options, for batches of 8 groups of 6 games."""
    return APRILGRPOConfig(
        str(folder), vllm_server_base_url=base_url, save_strategy="steps", logging_steps=1, report_to=[],
        disable_tqdm=True, use_cpu=True, bf16=False, gradient_checkpointing=False, num_generations=6,
        per_device_train_batch_size=12, gradient_accumulation_steps=4, max_completion_length=700,
        max_tool_calling_iterations=GUESSES + 2, learning_rate=2e-4, lr_scheduler_type="constant", **options,
    )  # fmt: skip


def run(seed: int, steps: int, model_dir: Path, server: LocalServer) -> dict[str, Any]:
    """Train to the middle, and from its checkpoint to the end in another trainer."""
    half = steps // 2
    rows = GAMES["games"](4 * steps * 8).map(lambda row: {"seed": TRAINING_SEEDS * (seed + 1) + row["seed"]})
    with tempfile.TemporaryDirectory(prefix="trl_april_games_") as folder:
        log: list[dict[str, float]] = []
        for last in (half, steps):
            args = training_args(
                folder, server.base_url, seed=seed, max_steps=steps, save_steps=half, replay_environments=True
            )
            trainer = APRILGRPOTrainer(
                str(model_dir), args=args, train_dataset=rows, environment_factory=partial(GAMES["Game"], NAME)
            )
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.add_callback(_Stop(last))
            trainer.train(resume_from_checkpoint=None if last == half else True)
            if last == half:
                samples = [sample for group in trainer.pool for sample in group.samples]
                games = sum(len(one) > 0 and one.state is not SampleState.FINISHED for one in samples)
            log = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {
        "seed": seed,
        "rewards": [entry["reward"] for entry in log],
        "calls": [entry["tools/call_frequency"] for entry in log],
        "partial_games": games,
        "restarted": sum(entry.get("april/restarted_samples", 0) for entry in log),
        "repeated": sum(entry.get("april/repeated_tool_steps", 0) for entry in log),
        "staleness_max": max(entry["april/staleness_max"] for entry in log),
    }


@contextmanager
def started(
    folder: Path, warm_start_steps: int, *flags: str, template: str | None = None, **options: Any
) -> Iterator[tuple[Path, LocalServer]]:
    """The folder of the warm-started model, and a server for it, with additional flags and options."""
    model_dir = folder / ("warm_start_games" if template is None else "warm_start_games_template")
    if not (model_dir / "model.safetensors").exists():
        torch.manual_seed(0)
        tokenizer = build_tokenizer()
        model = build_model(tokenizer)
        warm_start(model, tokenizer, warm_start_steps, template)
        save(model, tokenizer, model_dir)
    vllm_args = ["--dtype", "float32", "--max-model-len", "2048", "--enforce-eager", *flags]
    log_file = folder / "server_games.log"
    with LocalServer(model_dir, vllm_args=vllm_args, log_file=log_file, quiet=True, **options) as server:
        yield model_dir, server


def quarters(runs: list[dict[str, Any]], name: str) -> list[list[float]]:
    """Means over the quarters of each training."""
    return [
        [statistics.fmean(values[i * len(values) // 4 : (i + 1) * len(values) // 4]) for i in range(4)]
        for values in (run[name] for run in runs)
    ]


def table(runs: list[dict[str, Any]]) -> str:
    rows = [
        [
            str(run["seed"]), *(f"{mean:.3f}" for mean in reward), f"{calls[0]:.1f}, {calls[-1]:.1f}",
            *(f"{run[name]:.0f}" for name in ("partial_games", "restarted", "repeated", "staleness_max")),
        ]
        for run, reward, calls in zip(runs, quarters(runs, "rewards"), quarters(runs, "calls"), strict=True)
    ]  # fmt: skip
    header = (
        "seed", "reward, first quarter", "second", "third", "fourth", "guesses, first and last quarter",
        "unfinished games in the checkpoint", "started again", "calls made twice", "oldest token",
    )  # fmt: skip
    rises = [last - first for first, *_, last in quarters(runs, "rewards")]
    risen = f"\n\nreward, last quarter minus first: {statistics.fmean(rises):+.3f}"
    return markdown(header, rows) + risen + (f" ± {interval(rises)[1]:.3f}" if len(rises) > 1 else "")


def main() -> None:
    arguments = training_parser(__doc__).parse_args()
    prepare()
    steps, seeds = (4, 1) if arguments.quick else (arguments.steps, arguments.seeds)
    settings = {"steps": steps, "warm_start_steps": 20 if arguments.quick else WARM_START_STEPS}
    folder = arguments.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "games.json"
    runs = earlier_results(path, settings)
    left = sorted({*range(seeds)} - {run["seed"] for run in runs})
    with started(folder, settings["warm_start_steps"]) if left else nullcontext() as bench:
        for seed in left:
            runs.append(run(seed, steps, *bench))
            write_json(path, settings, runs)
            print(f"seed {seed}: {runs[-1]}", flush=True)
    print(f"\n{table(runs)}")


if __name__ == "__main__":
    main()

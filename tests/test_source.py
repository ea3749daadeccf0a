"""The row source against stock GRPO: the same rows in the same order, exactly as often, and none that comes too late.

The reference is `stock_rounds`, which is transformers' loop and TRL's rule for when to generate, without a model. That
it is what they do is shown by real training runs of stock GRPO on a tiny model. `micro` below is the number of calls
of `training_step` per round: `steps_per_generation * num_iterations`.
"""

import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, islice, product
from pathlib import Path

import pytest
import torch
from datasets import Dataset, IterableDataset
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from trl.trainer.utils import RepeatSampler, repeat_iterable_dataset

from tests.tiny import build_model, build_tokenizer
from trl_april.config import APRILGRPOConfig
from trl_april.errors import CheckpointError, ConfigError
from trl_april.pool import Pool
from trl_april.row_order import (
    make_source,
    open_permutation,
    open_stream,
    optimiser_steps_per_round,
    resumed_source,
    row_columns,
)
from trl_april.source import RowSource
from trl_april.trainer import APRILGRPOTrainer
from trl_april.types import FinishReason


# The reference


def stock_rounds(
    chunks: Callable[[int], list],
    *,
    micro: int,
    accumulation: int,
    max_steps: int,
    has_length: bool,
    start_step: int = 0,
    skip_rows: bool = True,
) -> list[tuple[int, object]]:
    """Every generation of a stock run, as the global step that it happens at and the chunk of rows that it gets.

    `Trainer.set_initial_training_values`, `_init_training_state` and `_run_epoch`, and TRL's `_prepare_inputs`, in
    their own words. `chunks(epoch)` are the complete chunks of rows of an epoch.
    """
    len_dataloader = len(chunks(0)) * micro if has_length else None
    if len_dataloader is not None:
        num_update_steps_per_epoch = max(-(-len_dataloader // accumulation), 1)
        steps_in_epoch = len_dataloader
    else:
        num_update_steps_per_epoch = max_steps
        steps_in_epoch = max_steps * accumulation
    global_step = start_step
    if global_step >= max_steps:
        return []
    epochs_trained = global_step // num_update_steps_per_epoch
    steps_trained_in_current_epoch = global_step % num_update_steps_per_epoch * accumulation if skip_rows else 0
    remainder = steps_in_epoch % accumulation or accumulation

    rounds = []
    trl_step = 0  # `self._step`, which no checkpoint holds
    epoch = epochs_trained
    while True:
        epoch_iterator = iter([chunk for chunk in chunks(epoch) for _ in range(micro)])
        step, num_update_steps_trained = -1, 0
        if epoch == epochs_trained and steps_trained_in_current_epoch > 0:
            list(islice(epoch_iterator, steps_trained_in_current_epoch))
            step = steps_trained_in_current_epoch - 1
            num_update_steps_trained = steps_trained_in_current_epoch // accumulation
        for update_step in range(num_update_steps_trained, num_update_steps_per_epoch):
            num_batches = accumulation if update_step != num_update_steps_per_epoch - 1 else remainder
            for inputs in list(islice(epoch_iterator, num_batches)):
                step += 1
                do_sync_step = (step + 1) % accumulation == 0 or (step + 1) == steps_in_epoch
                if trl_step % micro == 0:
                    rounds.append((global_step, inputs))
                trl_step += 1
                if do_sync_step:
                    global_step += 1
                    if global_step >= max_steps:
                        return rounds
        epoch += 1


def numbered_chunks(rounds_per_epoch: int, quota: int) -> Callable[[int], list[list[dict]]]:
    """Epochs of rows that say which epoch and row they are."""

    def chunks(epoch: int) -> list[list[dict]]:
        return [[{"row": (epoch, c * quota + i)} for i in range(quota)] for c in range(rounds_per_epoch)]

    return chunks


def as_epochs(chunks: Callable[[int], list[list[dict]]], leftover: int = 0) -> Callable[[int], Iterator[dict]]:
    """The same as a source reads them, with rows left over that fill no chunk."""

    def open_epoch(epoch: int) -> Iterator[dict]:
        rows = [row for chunk in chunks(epoch) for row in chunk]
        return iter([*rows, *({"row": (epoch, "left over")} for _ in range(leftover))])

    return open_epoch


def drain(source: RowSource, counts: Iterator[int]) -> list[tuple[int, dict]]:
    """Everything that a source hands out, asked for in pieces."""
    rows = []
    while True:
        count = next(counts)
        piece = source.next_rows(count)
        assert len(piece) <= count
        rows += piece
        if len(piece) < count:
            assert source.next_rows(5) == []  # the end is the end
            return rows
        assert len(rows) < 10_000, "the source does not end"


def endless(seed: int) -> Iterator[int]:
    rng = random.Random(seed)
    while True:
        yield rng.randint(1, 9)


# The same rows as often, whatever does not divide evenly

SIZES = {
    "quota": st.integers(1, 4),
    "micro": st.integers(1, 8),
    "accumulation": st.integers(1, 8),
    "rounds_per_epoch": st.integers(1, 5),
    "max_steps": st.integers(1, 20),
    "leftover": st.integers(0, 3),
    "pieces": st.integers(0, 10**6),
    "has_length": st.booleans(),
}


def check_against_stock(
    *,
    quota,
    micro,
    accumulation,
    rounds_per_epoch,
    max_steps,
    leftover=0,
    pieces=0,
    has_length=True,
    start_step=0,
    skip_rows=True,
):
    chunks = numbered_chunks(rounds_per_epoch, quota)
    source = RowSource(
        as_epochs(chunks, leftover % quota),
        groups_per_round=quota,
        micro_steps_per_round=micro,
        gradient_accumulation_steps=accumulation,
        max_steps=max_steps,
        rounds_per_epoch=rounds_per_epoch if has_length else None,
        start_step=start_step,
        skip_rows=skip_rows,
    )
    rounds = stock_rounds(
        chunks,
        micro=micro,
        accumulation=accumulation,
        max_steps=max_steps,
        has_length=has_length,
        start_step=start_step,
        skip_rows=skip_rows,
    )
    handed_out = drain(source, endless(pieces))
    assert [row for _, row in handed_out] == [row for _, chunk in rounds for row in chunk]
    ids = [group_id for group_id, _ in handed_out]
    assert ids == list(range(ids[0], ids[0] + len(ids))) if ids else True
    return ids


def trains_at_all(sizes: dict) -> bool:
    """A stream shorter than one optimiser step never does one: stock runs for ever, so there is nothing to match."""
    return sizes["has_length"] or sizes["rounds_per_epoch"] * sizes["micro"] >= sizes["accumulation"]


@given(**SIZES)
@settings(max_examples=400, deadline=None)
def test_exactly_the_rows_of_stock(**sizes):
    assume(trains_at_all(sizes))
    assert check_against_stock(**sizes)[0] == 0


EXAMPLE = {"quota": 1, "rounds_per_epoch": 2, "leftover": 0, "pieces": 0}


@given(start_step=st.integers(1, 20), **SIZES)
@example(start_step=3, micro=2, accumulation=3, max_steps=4, has_length=False, **EXAMPLE)
@example(start_step=3, micro=2, accumulation=3, max_steps=4, has_length=False, **{**EXAMPLE, "rounds_per_epoch": 4})
@settings(max_examples=600, deadline=None)
def test_exactly_the_rows_of_stock_after_resuming(start_step, **sizes):
    """Wherever the checkpoint falls: in an epoch, between two, or in the middle of a round.

    Pinned by the examples: a stream that ends while it is skipped, in the first by a whole round and in the second by
    one micro-step only. Stock begins its next epoch then, at `start_step`: what the end of an epoch rounds off is not
    rounded off twice.
    """
    assume(trains_at_all(sizes))
    check_against_stock(start_step=start_step, **sizes)


@given(start_step=st.integers(1, 20), **SIZES)
@example(start_step=1, micro=2, accumulation=3, max_steps=3, has_length=True, **EXAMPLE)
@settings(max_examples=600, deadline=None)
def test_exactly_the_rows_of_stock_after_resuming_without_skipping(start_step, **sizes):
    """`ignore_data_skip`: the epoch begins anew.

    Pinned by the example: so does its count of micro-steps, hence the step at which it ends.
    """
    assume(trains_at_all(sizes))
    check_against_stock(start_step=start_step, skip_rows=False, **sizes)


def test_by_hand():
    """2 rows and 2 optimiser steps per round, 3 rounds and one row left over per epoch; 9 steps are 5 rounds."""
    source = RowSource(
        as_epochs(numbered_chunks(3, 2), leftover=1),
        groups_per_round=2,
        micro_steps_per_round=4,
        gradient_accumulation_steps=2,
        max_steps=9,
        rounds_per_epoch=3,
    )
    expected = [(0, i) for i in range(6)] + [(1, i) for i in range(4)]
    assert drain(source, endless(0)) == [(i, {"row": row}) for i, row in enumerate(expected)]


def test_the_short_last_step_of_an_epoch_counts():
    """Pinned: 3 micro-steps per epoch with an accumulation of 2 are two optimiser steps of a map-style dataset, the
    second one shorter, but one of a stream. So 4 steps are two epochs of the one and four of the other."""
    sizes = {"groups_per_round": 1, "micro_steps_per_round": 3, "gradient_accumulation_steps": 2, "max_steps": 4}
    epochs = as_epochs(numbered_chunks(1, 1))
    assert len(drain(RowSource(epochs, rounds_per_epoch=1, **sizes), endless(0))) == 2
    assert len(drain(RowSource(epochs, **sizes), endless(0))) == 4


def test_resuming_continues_the_ids_and_the_epochs_of_the_uninterrupted_run():
    """Pinned: each epoch is opened once and in order also when resuming, since opening draws its permutation."""
    sizes = {
        "groups_per_round": 2,
        "micro_steps_per_round": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 9,
        "rounds_per_epoch": 3,
    }
    chunks = numbered_chunks(3, 2)
    whole = drain(RowSource(as_epochs(chunks), **sizes), endless(0))
    for start_step in range(10):
        opened = []

        def open_epoch(epoch, opened=opened):
            opened.append(epoch)
            return as_epochs(chunks)(epoch)

        assert drain(RowSource(open_epoch, start_step=start_step, **sizes), endless(1)) == whole[2 * start_step :]
        assert opened == list(range(len(opened)))


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_too_few_rows_for_a_single_round(rows):
    source = RowSource(
        lambda epoch: iter([{}] * rows),
        groups_per_round=4,
        micro_steps_per_round=1,
        gradient_accumulation_steps=1,
        max_steps=1,
    )
    with pytest.raises(ConfigError) as caught:
        source.next_rows(1)
    for word in (f"has {rows} rows", "needs 4 prompts", "Add rows", "generation_batch_size", "num_generations"):
        assert word in str(caught.value)


def test_nothing_is_read_that_nobody_asked_for():
    """A stream may be slow: no row is read before it is wanted, but for the rest of its chunk."""
    read = []

    def open_epoch(epoch):
        for i in range(100):
            read.append(i)
            yield {"row": i}

    source = RowSource(
        open_epoch, groups_per_round=4, micro_steps_per_round=1, gradient_accumulation_steps=1, max_steps=9
    )
    assert read == []
    assert [row for _, row in source.next_rows(5)] == [{"row": i} for i in range(5)]
    assert read == list(range(8))


# Pool and source, without any engine (rule 9)

TRAINING = {
    "seed": st.integers(0, 10**9),
    "prompts": st.integers(1, 2),
    "steps_per_generation": st.integers(1, 4),
    "num_iterations": st.integers(1, 2),
    "accumulation": st.integers(1, 5),
    "rounds_per_epoch": st.integers(1, 4),
    "max_steps": st.integers(1, 15),
    "has_length": st.booleans(),
    "factor": st.sampled_from([1.0, 1.5, 2.0]),
}


@given(**TRAINING)
@example(
    seed=0,
    prompts=1,
    steps_per_generation=2,
    num_iterations=1,
    accumulation=3,
    rounds_per_epoch=2,
    max_steps=4,
    has_length=True,
    factor=2.0,
)
@settings(max_examples=300, deadline=None)
def test_training_ends_with_an_empty_pool_and_every_row_trained_as_often_as_in_stock(**sizes):
    """Rule 9, with the staleness guarantee on: the policy versions are those that stock would have.

    Pinned by the example: the short optimiser step at the end of an epoch is a version too. With 2 micro-steps per
    round, an accumulation of 3 and 2 rounds per epoch, the version goes from 0 to 2 in the epoch's second round.
    """
    train_without_an_engine(start_step=0, **sizes)


@given(start_step=st.integers(1, 8), **TRAINING)
@example(  # the last round of the resumed epoch reaches over its end, where steps count anew
    start_step=2,
    seed=0,
    prompts=1,
    steps_per_generation=4,
    num_iterations=1,
    accumulation=3,
    rounds_per_epoch=2,
    max_steps=3,
    has_length=False,
    factor=1.0,
)
@settings(max_examples=300, deadline=None)
def test_resumed_training_ends_with_an_empty_pool_too(**sizes):
    train_without_an_engine(**sizes)


def train_without_an_engine(
    *,
    seed,
    prompts,
    steps_per_generation,
    num_iterations,
    accumulation,
    rounds_per_epoch,
    max_steps,
    has_length,
    factor,
    start_step,
):
    rng = random.Random(seed)
    micro = steps_per_generation * num_iterations
    sizes = {"micro": micro, "accumulation": accumulation, "has_length": has_length}
    assume(trains_at_all({**sizes, "rounds_per_epoch": rounds_per_epoch}))
    args = APRILGRPOConfig(
        per_device_train_batch_size=2 * prompts,
        num_generations=2,
        steps_per_generation=steps_per_generation,
        num_iterations=num_iterations,
        gradient_accumulation_steps=accumulation,
        use_cpu=True,
        bf16=False,
    )
    versions_per_round = optimiser_steps_per_round(args)
    quota = args.generation_batch_size // args.num_generations
    chunks = numbered_chunks(rounds_per_epoch, quota)
    rounds = stock_rounds(chunks, max_steps=max_steps, start_step=start_step, **sizes)
    source = RowSource(
        as_epochs(chunks),
        groups_per_round=quota,
        micro_steps_per_round=micro,
        gradient_accumulation_steps=accumulation,
        max_steps=max_steps,
        rounds_per_epoch=rounds_per_epoch if has_length else None,
        start_step=start_step,
    )
    pool = Pool(
        quota,
        over_provisioning=factor,
        max_staleness=2 * versions_per_round,
        versions_per_round=versions_per_round,
    )
    trained = Counter()
    for version, _ in rounds:
        pool.begin_round(version)
        for group_id, row in source.next_rows(pool.room):
            pool.admit(group_id, row, [1], num_generations=1, max_completion_length=9)
        unfinished = [group for group in pool if group.samples[0].finish_reason is None]
        while not pool.quota_met:
            assert unfinished, "all that was admitted is finished, and it fills no batch"
            (sample,) = unfinished.pop(rng.randrange(len(unfinished))).samples
            pool.start(sample)
            pool.record(sample, [1], [-1.0])
            pool.finish(sample, FinishReason.STOP)
        trained.update(group.row["row"] for group in pool.take())
        pool.check()
    assert len(pool) == 0
    assert source.next_rows(1) == []
    assert trained == Counter(row["row"] for _, chunk in rounds for row in chunk)


# The same order as TRL's own sampler and stream


@pytest.fixture(scope="module")
def model_and_tokenizer():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for so small a model, threads only wait for each other
    yield build_model(), build_tokenizer()
    torch.set_num_threads(threads)


def rows_of(rows: int) -> Dataset:
    return Dataset.from_dict({"prompt": [f"p{i}" for i in range(rows)], "number": list(range(rows))})


def stream_of(rows: int) -> IterableDataset:
    return rows_of(rows).to_iterable_dataset(num_shards=2)


def make_trainer(model_and_tokenizer, output_dir: Path, dataset, **options) -> APRILGRPOTrainer:
    """A trainer whose generations are recorded in `trainer.generations`, as `(global step, prompts)`.

    Given a `rollout_func`, it runs stock GRPO, and its sources can be asked for beside that.
    """
    model, tokenizer = model_and_tokenizer
    generations = []

    def rollout(prompts, trainer):
        generations.append((trainer.state.global_step, prompts[:: trainer.num_generations]))
        return {
            "prompt_ids": [[5, 6]] * len(prompts),
            "completion_ids": [[7, 2]] * len(prompts),
            "logprobs": [[-1.0, -1.0]] * len(prompts),
        }

    trainer = APRILGRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **kwargs: [float(i % 2) for i in range(len(completions))],
        args=APRILGRPOConfig(
            str(output_dir),
            **{
                "use_vllm": False,
                "use_cpu": True,
                "bf16": False,
                "gradient_checkpointing": False,
                "num_generations": 2,
                "per_device_train_batch_size": 2,
                "report_to": "none",
                "disable_tqdm": True,
                "save_strategy": "no",
                "learning_rate": 0.0,
                **options,
            },
        ),
        train_dataset=dataset,
        rollout_func=rollout,
    )
    trainer.generations = generations
    return trainer


@pytest.mark.parametrize("rows", [4, 7, 12])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("seed", [0, 42])
def test_permutations_are_those_of_trls_sampler(model_and_tokenizer, tmp_path, rows, shuffle, seed):
    trainer = make_trainer(
        model_and_tokenizer,
        tmp_path,
        rows_of(rows),
        shuffle_dataset=shuffle,
        seed=seed,
        steps_per_generation=3,
        num_iterations=2,
        max_steps=1,
    )
    quota = 3
    sampler = RepeatSampler(range(rows), mini_repeat_count=1, batch_size=quota, shuffle=shuffle, seed=seed)
    rounds, open_epoch = open_permutation(trainer, quota)
    assert rounds == rows // quota
    epochs = [list(open_epoch(epoch)) for epoch in range(3)]
    assert [[row["number"] for row in epoch] for epoch in epochs] == [list(sampler) for _ in range(3)]
    assert all(row["prompt"] == f"p{row['number']}" for epoch in epochs for row in epoch)
    if shuffle and rows == 12:
        assert epochs[0] != epochs[1]


@pytest.mark.parametrize("streamed", [False, True])
def test_rows_come_through_the_collator(model_and_tokenizer, tmp_path, streamed):
    trainer = make_trainer(model_and_tokenizer, tmp_path, (stream_of if streamed else rows_of)(4), max_steps=1)
    trainer.data_collator = lambda rows: [{"prompt": f"Be brief. {row['prompt']}", "level": 1} for row in rows]
    _, opened = (open_stream if streamed else open_permutation)(trainer, 2)
    rows = list(opened(0))
    assert len(rows) == 4 and all(row["prompt"].startswith("Be brief. p") for row in rows)
    assert row_columns(trainer) == ["prompt", "level"] == list(rows[0])


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("remove", [False, True])
def test_the_columns_of_rows_are_those_that_training_has(model_and_tokenizer, tmp_path, streamed, remove):
    """TRL removes columns, if it is told to."""
    trainer = make_trainer(
        model_and_tokenizer, tmp_path, (stream_of if streamed else rows_of)(4), max_steps=1,
        remove_unused_columns=remove,
    )  # fmt: skip
    _, opened = (open_stream if streamed else open_permutation)(trainer, 2)
    assert sorted(row_columns(trainer)) == sorted(next(opened(0))) == (["prompt"] if remove else ["number", "prompt"])


@pytest.mark.parametrize(("times", "rounds"), [(0.5, 4), (1, 8), (3, 24)])
def test_a_sampler_of_another_length_has_other_epochs(model_and_tokenizer, tmp_path, times, rounds):
    """Of a subclass that shows some rows more often than others, or leaves some out."""
    trainer = make_trainer(model_and_tokenizer, tmp_path, rows_of(8), max_steps=1)
    stock = trainer._get_train_sampler

    def sampler(dataset=None):
        indices = list(stock(dataset))
        return (indices * math.ceil(times))[: round(len(indices) * times)]

    trainer._get_train_sampler = sampler
    number, open_epoch = open_permutation(trainer, 1)
    assert number == rounds == len(list(open_epoch(0)))
    # Behind so many, training is resumed in the next epoch.
    assert [make_source(trainer, start_step=step)._epoch for step in (rounds - 1, rounds)] == [0, 1]


@pytest.mark.parametrize("rows", [4, 7, 12])
@pytest.mark.parametrize("shuffle", [False, True])
def test_streams_are_in_trls_order(model_and_tokenizer, tmp_path, rows, shuffle):
    trainer = make_trainer(
        model_and_tokenizer, tmp_path, stream_of(rows), shuffle_dataset=shuffle, seed=7, max_steps=1
    )
    stream = stream_of(rows)
    if shuffle:
        stream = stream.shuffle(seed=7)
    stream = repeat_iterable_dataset(stream, mini_repeat_count=2, batch_size=3, repeat_count=4)
    _, open_epoch = open_stream(trainer, 3)
    for epoch in range(3):
        stream.set_epoch(epoch)
        numbers = [row["number"] for row in stream]
        once = [number for start in range(0, len(numbers), 24) for number in numbers[start : start + 6 : 2]]
        assert [row["number"] for row in open_epoch(epoch)] == once


# What stock GRPO really trains on. Both the reference above and the trainer's source have to say the same.

RUNS = {
    "one step per round": {"rows": 5, "max_steps": 7},
    "epochs": {"rows": 5, "num_train_epochs": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 2},
    "a part of an epoch": {"rows": 10, "num_train_epochs": 1.5, "steps_per_generation": 2},
    "two steps per round": {"rows": 7, "max_steps": 7, "steps_per_generation": 4, "gradient_accumulation_steps": 2},
    "iterations": {"rows": 6, "max_steps": 9, "steps_per_generation": 2, "num_iterations": 3},
    "short last step": {"rows": 3, "max_steps": 7, "steps_per_generation": 3, "gradient_accumulation_steps": 2},
    "round over two steps": {"rows": 4, "max_steps": 5, "steps_per_generation": 2, "gradient_accumulation_steps": 3},
    "four rounds per step": {"rows": 8, "max_steps": 5, "steps_per_generation": 1, "gradient_accumulation_steps": 4},
}


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize("run", RUNS)
def test_the_source_gives_what_stock_trains_on(model_and_tokenizer, tmp_path, run, streaming):
    options = dict(RUNS[run])
    rows = options.pop("rows")
    if streaming and "max_steps" not in options:
        options["max_steps"] = 6  # a stream needs it
    trainer = make_trainer(
        model_and_tokenizer, tmp_path, stream_of(rows) if streaming else rows_of(rows), seed=3, **options
    )
    trainer.train()
    check_source_of(trainer)


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize("skip", [True, False], ids=["skip", "no skip"])
def test_the_source_gives_what_stock_trains_on_after_resuming(model_and_tokenizer, tmp_path, streaming, skip):
    """Resumed in the middle of the first epoch, and of a round: stock generates that round anew."""
    options = {"max_steps": 9, "steps_per_generation": 2, "seed": 3, "ignore_data_skip": not skip}
    dataset = stream_of(16) if streaming else rows_of(16)
    first = make_trainer(
        model_and_tokenizer, tmp_path, dataset, save_strategy="steps", save_steps=5, save_only_model=False, **options
    )
    first.train()
    resumed = make_trainer(model_and_tokenizer, tmp_path, dataset, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert resumed.generations[0][0] == 5
    check_source_of(resumed, start_step=5)


def test_prompts_that_a_transform_makes_are_those_of_stock(model_and_tokenizer, tmp_path):
    dataset = Dataset.from_dict({"number": list(range(8))})
    dataset = dataset.with_transform(lambda rows: {"prompt": [f"p{number}" for number in rows["number"]]})
    trainer = make_trainer(model_and_tokenizer, tmp_path, dataset, max_steps=6, seed=3)
    trainer.train()
    assert {prompt for _, prompts in trainer.generations for prompt in prompts} <= {f"p{i}" for i in range(8)}
    check_source_of(trainer)


def check_source_of(trainer: APRILGRPOTrainer, start_step: int = 0) -> None:
    args = trainer.args
    quota = args.generation_batch_size // args.num_generations
    is_stream = isinstance(trainer.train_dataset, IterableDataset)
    assert trainer.state.global_step == trainer.state.max_steps

    trainer.state.global_step = start_step
    source = make_source(trainer)
    assert [row["prompt"] for _, row in drain(source, endless(0))] == [
        prompt for _, prompts in trainer.generations for prompt in prompts
    ]

    _, open_epoch = (open_stream if is_stream else open_permutation)(trainer, quota)
    epochs: dict[int, list] = {}

    def chunks(epoch):
        while len(epochs) <= epoch:
            prompts = [row["prompt"] for row in open_epoch(len(epochs))]
            epochs[len(epochs)] = [prompts[i : i + quota] for i in range(0, len(prompts), quota)]
        return epochs[epoch]

    assert trainer.generations == stock_rounds(
        chunks,
        micro=args.steps_per_generation * args.num_iterations,
        accumulation=args.gradient_accumulation_steps,
        max_steps=trainer.state.max_steps,
        has_length=not is_stream,
        start_step=start_step,
        skip_rows=not args.ignore_data_skip,
    )


# Rows in the place of rejected ones


def plain_source(rows: int, *, per_round: int = 2, max_steps: int = 3) -> RowSource:
    """Rows 0, 1, 2, ... in every epoch; one optimiser step per round."""
    return RowSource(
        lambda epoch: iter([{"row": row, "epoch": epoch} for row in range(rows)]),
        groups_per_round=per_round,
        micro_steps_per_round=1,
        gradient_accumulation_steps=1,
        max_steps=max_steps,
        rounds_per_epoch=rows // per_round,
    )


def places(rows: list) -> list[tuple[int, int]]:
    return [(row["epoch"], row["row"]) for _, row in rows]


def test_rejected_groups_are_replaced_by_the_rows_that_follow():
    source = plain_source(10)
    assert len(source.next_rows(100)) == 6  # three rounds of two
    assert source.next_rows(1) == []
    source.replace(3)
    rows = source.next_rows(100)
    assert places(rows) == [(0, 6), (0, 7), (0, 8)]
    assert [group_id for group_id, _ in rows] == [6, 7, 8]
    assert source.next_rows(1) == []


def test_rows_that_replace_others_go_on_in_the_next_epoch():
    source = plain_source(4, max_steps=2)
    source.replace(6)
    assert places(source.next_rows(100)) == [(epoch, row) for epoch in range(3) for row in range(4)][:10]


def test_planned_rows_come_before_those_that_are_owed():
    source = plain_source(10)
    source.replace(1)
    assert places(source.next_rows(2)) == [(0, 0), (0, 1)]
    assert len(source.next_rows(100)) == 5


def test_what_was_not_handed_out_yet_can_be_taken_back():
    source = plain_source(10)
    source.replace(3)
    assert source.take_back(2) == 0
    assert len(source.next_rows(100)) == 7
    assert source.take_back(1) == 1  # it is on its way already


def test_a_dataset_that_runs_out_of_rows_to_replace_others_says_so():
    rows = iter([{"row": 0}, {"row": 1}])
    source = RowSource(
        lambda epoch: rows, groups_per_round=2, micro_steps_per_round=1, gradient_accumulation_steps=1, max_steps=1
    )
    assert len(source.next_rows(2)) == 2
    source.replace(1)
    with pytest.raises(ConfigError, match="1 rejected groups have to be replaced"):
        source.next_rows(1)


# Behind the rows of a checkpoint


def small_sizes() -> Iterator[dict]:
    for quota, micro, accumulation, rounds_per_epoch in product((1, 2), (1, 2, 3), (1, 2, 3), (1, 2, 3)):
        for has_length in (True, False):
            sizes = {"micro": micro, "accumulation": accumulation, "rounds_per_epoch": rounds_per_epoch}
            if trains_at_all({**sizes, "has_length": has_length}):
                yield {**sizes, "quota": quota, "has_length": has_length}


def small_source(*, quota, micro, accumulation, rounds_per_epoch, has_length, start_step, max_steps=5) -> RowSource:
    return RowSource(
        as_epochs(numbered_chunks(rounds_per_epoch, quota)),
        groups_per_round=quota,
        micro_steps_per_round=micro,
        gradient_accumulation_steps=accumulation,
        max_steps=max_steps,
        rounds_per_epoch=rounds_per_epoch if has_length else None,
        start_step=start_step,
    )


def test_a_source_goes_on_behind_every_row():
    """Exhaustively: small sizes, every start, every cut, with and without rejected groups before and after it."""
    for sizes in small_sizes():
        for start_step in (0, 1, 4):
            planned = len(small_source(start_step=start_step, **sizes).next_rows(1000))
            for rejected in (0, 1, 3):
                whole = small_source(start_step=start_step, **sizes)
                whole.replace(rejected)
                rows = whole.next_rows(1000)
                assert len(rows) == planned + rejected
                for cut in range(len(rows) + 1):
                    before = small_source(start_step=start_step, **sizes)
                    before.replace(rejected)
                    assert before.next_rows(cut) == rows[:cut]
                    after = small_source(start_step=start_step, **sizes)
                    assert after.pass_over(cut, rejected=rejected, next_id=0) == 0
                    assert after.state_dict() == before.state_dict()
                    assert after.state_dict()["handed_out"] == cut
                    for source in (after, before):
                        source.replace(1)
                    assert after.next_rows(1000) == before.next_rows(1000)


def test_what_training_has_no_use_for_is_counted():
    source = plain_source(10, max_steps=3)
    assert source.pass_over(9, rejected=1, next_id=0) == 2  # three rounds of two, and one in the place of another
    assert source.next_rows(1) == []


def test_ids_go_on_behind_those_that_there_were():
    source = plain_source(10)
    source.pass_over(3, rejected=0, next_id=9)
    assert [group_id for group_id, _ in source.next_rows(2)] == [9, 10]
    source = plain_source(10)
    source.pass_over(3, rejected=0, next_id=2)
    assert [group_id for group_id, _ in source.next_rows(2)] == [3, 4]


def test_rows_that_are_passed_over_are_not_kept():
    """Pinned: of a long run they are too many."""
    held = set()

    class Seen(dict):
        def __init__(self, number: int) -> None:
            super().__init__(row=number)
            held.add(number)

        def __del__(self) -> None:
            held.discard(self["row"])

    most = 0

    def open_epoch(epoch: int) -> Iterator[dict]:
        nonlocal most
        for number in range(1000):
            most = max(most, len(held))
            yield Seen(number)

    source = RowSource(
        open_epoch, groups_per_round=4, micro_steps_per_round=1, gradient_accumulation_steps=1, max_steps=250
    )
    assert source.pass_over(990, rejected=0, next_id=0) == 0
    assert most <= 8 and [row["row"] for _, row in source.next_rows(2)] == [990, 991]


def test_another_sources_rows_by_the_count_of_this_one():
    counted, read = plain_source(4, max_steps=3), plain_source(10, max_steps=1)
    read.next_rows(1)
    counted.next_rows(2)
    counted.hand_out_instead(read)
    rows = counted.next_rows(100)
    assert [group_id for group_id, _ in rows] == [2, 3, 4, 5]
    assert [row["row"] for _, row in rows] == [1, 2, 3, 4]  # also beyond the one step that `read` was planned for
    assert counted.state_dict() == read.state_dict() and counted.state_dict()["handed_out"] == 5
    counted.replace(1)
    assert [row["row"] for _, row in counted.next_rows(100)] == [5]


# Resuming a trainer's source

RESUMED = [
    # steps_per_generation (here also the quota), num_iterations, gradient_accumulation_steps, rows
    *((1, 1, 1, 5), (2, 1, 2, 7), (2, 1, 1, 6), (2, 2, 2, 5)),
    *((2, 1, 4, 9), (1, 1, 2, 3), (2, 1, 3, 5), (1, 3, 2, 2)),  # what does not come out even
]
MAX_STEPS = 6


class Interrupted:
    """What the source of a trainer hands out before and after a checkpoint, and what is to be expected of it."""

    def __init__(self, trainer: APRILGRPOTrainer, rows: int) -> None:
        args = trainer.args
        self.trainer = trainer
        self.is_stream = isinstance(trainer.train_dataset, IterableDataset)
        self.quota = args.generation_batch_size // args.num_generations
        self.micro = args.steps_per_generation * args.num_iterations
        self.accumulation = args.gradient_accumulation_steps
        self.rounds_per_epoch = rows // self.quota
        _, opened = (open_stream if self.is_stream else open_permutation)(trainer, self.quota)
        self.epochs = [[row["number"] for row in opened(epoch)] for epoch in range(1 + 4 * MAX_STEPS)]
        self.endless = [number for epoch in self.epochs for number in epoch]

    def chunks(self, epoch: int) -> list[list[int]]:
        numbers = self.epochs[epoch]
        return [numbers[i : i + self.quota] for i in range(0, len(numbers), self.quota)]

    def stock_from(self, step: int) -> list[int]:
        """The rows that stock GRPO generates for, resumed at `step`."""
        rounds = stock_rounds(
            self.chunks,
            micro=self.micro,
            accumulation=self.accumulation,
            max_steps=MAX_STEPS,
            has_length=not self.is_stream,
            start_step=step,
            skip_rows=not self.trainer.args.ignore_data_skip,
        )
        return [number for _, chunk in rounds for number in chunk]

    def trained_by(self, step: int) -> int:
        """Rows of the batches that an undisturbed run has trained to their end by then."""
        per_epoch = self.rounds_per_epoch * self.micro
        steps_per_epoch = per_epoch // self.accumulation
        if not self.is_stream and per_epoch % self.accumulation:
            steps_per_epoch += 1
        epochs, steps = divmod(step, steps_per_epoch)
        if steps == 0 and self.is_stream:  # a step ends before what an epoch has left over
            epochs, steps = epochs - 1, steps_per_epoch
        return (epochs * per_epoch + min(steps * self.accumulation, per_epoch)) // self.micro * self.quota

    def at(self, step: int) -> APRILGRPOTrainer:
        self.trainer.state.global_step, self.trainer.state.max_steps = step, MAX_STEPS
        return self.trainer

    def cursor(self, handed_out: int, rejected: int = 0) -> dict[str, int]:
        source = make_source(self.at(0))
        source.replace(rejected)
        rows = [row["number"] for _, row in source.next_rows(handed_out)]
        assert rows == self.endless[:handed_out]
        return source.state_dict()

    def resumed(self, step: int, cursor: dict, *, held: int, rejected: int = 0) -> tuple[list[int], int]:
        """What is handed out after resuming, and how many groups in flight are of no use any more."""
        source, unused = resumed_source(self.at(step), cursor, held=held, rejected=rejected, next_id=1000)
        rows = drain(source, endless(step))
        assert [group_id for group_id, _ in rows] == list(range(1000, 1000 + len(rows)))
        return [row["number"] for _, row in rows], unused


@pytest.fixture(params=RESUMED, ids=lambda sizes: "-".join(map(str, sizes)))
def sizes(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["map", "stream"])
def interrupted(request, sizes, model_and_tokenizer, tmp_path) -> Interrupted:
    steps_per_generation, num_iterations, accumulation, rows = sizes
    trainer = make_trainer(
        model_and_tokenizer,
        tmp_path,
        stream_of(rows) if request.param else rows_of(rows),
        steps_per_generation=steps_per_generation,
        num_iterations=num_iterations,
        gradient_accumulation_steps=accumulation,
        max_steps=MAX_STEPS,
        seed=3,
    )
    return Interrupted(trainer, rows)


def test_rows_before_and_after_a_checkpoint_are_those_of_an_undisturbed_run(interrupted):
    """Exhaustively: every step, also inside of a batch, and every number of groups in flight, in the next epoch too.

    After it, as many rows are handed out as stock GRPO, resumed there, would need beside those in flight.
    """
    planned = len(interrupted.stock_from(0))
    even = interrupted.micro % interrupted.accumulation == 0
    for step in range(1, MAX_STEPS):
        trained, needed = interrupted.trained_by(step), len(interrupted.stock_from(step))
        for handed_out in range(trained, planned + 1):
            held = handed_out - trained
            after, unused = interrupted.resumed(step, interrupted.cursor(handed_out), held=held)
            where = f"step {step}, {handed_out} handed out"
            assert after == interrupted.endless[handed_out:][: max(0, needed - held)], where
            if held <= needed:
                assert unused == 0, where
            if even and step * interrupted.accumulation % interrupted.micro == 0:
                assert handed_out + len(after) == planned, where


@pytest.mark.parametrize("rejected", [1, 3])
def test_as_many_rows_more_as_groups_were_rejected(interrupted, rejected):
    planned = len(interrupted.stock_from(0))
    for step in range(1, MAX_STEPS):
        trained, needed = interrupted.trained_by(step), len(interrupted.stock_from(step))
        for handed_out in range(trained + rejected, planned + rejected + 1, 2):
            held = handed_out - trained - rejected
            cursor = interrupted.cursor(handed_out, rejected)
            after, _ = interrupted.resumed(step, cursor, held=held, rejected=rejected)
            assert after == interrupted.endless[handed_out:][: max(0, needed - held)], f"step {step}, {handed_out}"


# Elsewhere the number of micro-steps between two steps depends on where epochs end.
@pytest.mark.parametrize("sizes", [sizes for sizes in RESUMED if sizes[0] * sizes[1] % sizes[2] == 0], indirect=True)
def test_two_checkpoints_one_after_the_other(interrupted):
    for steps in combinations(range(1, MAX_STEPS), 2):
        assert_rows_go_on(interrupted, steps)


@pytest.fixture
def longer(monkeypatch):
    """Before `interrupted`: a run that is long enough for its end to hide nothing."""
    monkeypatch.setattr(sys.modules[__name__], "MAX_STEPS", 16)


@pytest.mark.parametrize("sizes", [(2, 1, 1, 6), (2, 2, 2, 5)], indirect=True)
def test_checkpoints_one_after_the_other_in_a_long_run(longer, interrupted):
    """Inside of batches, too, so that every run has batches of its own."""
    for steps in [*combinations(range(1, 6), 2), (1, 2, 3), (1, 3, 4), (2, 3, 5), (3, 6, 9), (1, 2, 5, 8)]:
        assert_rows_go_on(interrupted, steps)


def assert_rows_go_on(interrupted, steps: Sequence[int]) -> None:
    """Resumed at each of these steps, a run goes on with the rows behind those that were handed out before."""
    quota = interrupted.quota
    begun, trained = steps[0], interrupted.trained_by(steps[0])
    handed_out = trained + quota
    cursor = interrupted.cursor(handed_out)
    for step in steps:
        trained += (step - begun) * interrupted.accumulation // interrupted.micro * quota
        begun, held, needed = step, handed_out - trained, len(interrupted.stock_from(step))
        if held < 0:
            return  # more would have been handed out by then
        after, _ = interrupted.resumed(step, cursor, held=held)
        assert after == interrupted.endless[handed_out:][: max(0, needed - held)], f"{step} of {steps}"
        source, _ = resumed_source(interrupted.at(step), cursor, held=held, rejected=0, next_id=0)
        handed_out += len(source.next_rows((step - begun + 3) * quota + 1))
        cursor = source.state_dict()


def test_an_epoch_begun_anew(interrupted):
    """`ignore_data_skip`: as in stock GRPO, but that the rows in flight are trained in the place of its first ones."""
    planned = len(interrupted.stock_from(0))
    cursors = {handed_out: interrupted.cursor(handed_out) for handed_out in range(planned + 1)}
    interrupted.trainer.args.ignore_data_skip = True
    for step in range(1, MAX_STEPS):
        expected = interrupted.stock_from(step)
        for held in range(0, min(planned, len(expected)) + 1, 3):
            after, unused = interrupted.resumed(step, cursors[held], held=held)
            assert (after, unused) == (expected[held:], 0), f"step {step}, {held} held"


def test_another_batch_size_than_before(interrupted):
    """As in stock GRPO, which takes the steps done for steps of the new size; what is in flight is not read again."""
    changes = "groups_per_round", "micro_steps_per_round", "gradient_accumulation_steps"
    for step, change in enumerate(changes, 1):
        cursor = interrupted.cursor(interrupted.quota)
        cursor[change] += 1
        expected = interrupted.stock_from(step)
        for held in (0, 1, len(expected), len(expected) + 2):
            after, unused = interrupted.resumed(step, cursor, held=held)
            assert (after, unused) == (expected[held:], max(0, held - len(expected))), f"{change}, step {step}"


def test_a_cursor_of_a_later_run_is_refused(interrupted):
    """And nothing is read: the steps that it says have been done may be any number."""
    cursor = {**interrupted.cursor(0), "origin": 10**12}
    with pytest.raises(CheckpointError, match="began at step 1000000000000, and its weights are those of step 3"):
        resumed_source(interrupted.at(3), cursor, held=0, rejected=0, next_id=0)

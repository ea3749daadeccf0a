"""The row source against stock GRPO: the same rows in the same order, exactly as often, and none that comes too late.

The reference is `stock_rounds`: transformers' loop and TRL's rule for when to generate, without a model. Real training
runs of stock GRPO on a tiny model confirm it. `micro` is the number of calls of `training_step` per round.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch
from datasets import Dataset, IterableDataset
from hypothesis import assume, example, given
from hypothesis import strategies as st
from trl.trainer.utils import RepeatSampler

from tests.support.pools import complete
from tests.support.tiny import build_model, build_tokenizer
from trl_april.bridge.rows import read_once, training_rows
from trl_april.config import APRILGRPOConfig
from trl_april.data.order import TrainingRows, make_source, resumed_source
from trl_april.data.plan import TrainingPlan
from trl_april.data.source import RowSource
from trl_april.data.stream import SharedStream
from trl_april.errors import CheckpointError, ConfigError
from trl_april.pool.pool import Pool
from trl_april.trainer import APRILGRPOTrainer


def plan_of(quota: int = 1, micro: int = 1, accumulation: int = 1, max_steps: int = 1, **values) -> TrainingPlan:
    return TrainingPlan(
        groups_per_round=quota,
        micro_steps_per_round=micro,
        gradient_accumulation_steps=accumulation,
        max_steps=max_steps,
        **{"num_generations": 2, "vocab_size": 99, **values},
    )


def stock_rounds(
    chunks: Callable[[int], list],
    *,
    micro: int,
    accumulation: int,
    max_steps: int,
    has_length: bool,
    start_step: int = 0,
    skip_rows: bool = True,
    changes: dict[int, int] | None = None,
) -> list[tuple[int, object]]:
    """Every generation of a stock run, as its global step and its chunk of rows.

    Follows `Trainer.set_initial_training_values`, `_init_training_state` and `_run_epoch`, and TRL's
    `_prepare_inputs`. `chunks(epoch)` are the complete chunks of rows of an epoch. `changes` has the values that a
    callback gives `state.max_steps` at the end of steps.
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
    num_train_epochs = -(-max_steps // num_update_steps_per_epoch) if has_length else math.inf

    rounds = []
    trl_step = 0  # `self._step`, which no checkpoint holds
    epoch = epochs_trained
    while epoch < num_train_epochs:
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
                    max_steps = (changes or {}).get(global_step, max_steps)
                    if global_step >= max_steps:
                        return rounds
        epoch += 1
    return rounds


def stock_rounds_of(plan: TrainingPlan, chunks: Callable[[int], list], **options) -> list[tuple[int, object]]:
    return stock_rounds(
        chunks,
        micro=plan.micro_steps_per_round,
        accumulation=plan.gradient_accumulation_steps,
        max_steps=plan.max_steps,
        skip_rows=plan.skip_trained_rows,
        **options,
    )


def stock_rows(plan: TrainingPlan, chunks: Callable[[int], list], *, has_length: bool, start_step: int = 0) -> list:
    rounds = stock_rounds_of(plan, chunks, has_length=has_length, start_step=start_step)
    return [row for _, chunk in rounds for row in chunk]


def numbered_chunks(rounds_per_epoch: int, quota: int) -> Callable[[int], list[list[dict]]]:
    """Epochs of rows that name their epoch and position."""

    def chunks(epoch: int) -> list[list[dict]]:
        return [[{"row": (epoch, c * quota + i)} for i in range(quota)] for c in range(rounds_per_epoch)]

    return chunks


def as_epochs(chunks: Callable[[int], list[list[dict]]], leftover: int = 0) -> Callable[[int], Iterator[dict]]:
    """The same as a source reads them, with leftover rows that fill no chunk."""

    def open_epoch(epoch: int) -> Iterator[dict]:
        rows = [row for chunk in chunks(epoch) for row in chunk]
        return iter([*rows, *({"row": (epoch, "left over")} for _ in range(leftover))])

    return open_epoch


def drain(source: RowSource, seed: int = 0) -> list[tuple[int, dict]]:
    """All rows of a source, in pieces of random sizes."""
    rng, rows = random.Random(seed), []
    while True:
        wanted = rng.randint(1, 9)
        piece = source.next_rows(wanted)
        assert len(piece) <= wanted
        rows += piece
        if len(piece) < wanted:
            assert source.next_rows(5) == []  # the end is the end
            return rows
        assert len(rows) < 10_000, "the source does not end"


SIZES = {
    "quota": st.integers(1, 4),
    "micro": st.integers(1, 8),
    "accumulation": st.integers(1, 8),
    "rounds_per_epoch": st.integers(1, 5),
    "max_steps": st.integers(1, 20),
    "has_length": st.booleans(),
}
RULE_9 = {"quota": 4, "micro": 4, "accumulation": 3, "rounds_per_epoch": 2}
EXAMPLE = {"quota": 1, "rounds_per_epoch": 2, "micro": 2, "accumulation": 3, "leftover": 0, "pieces": 0}


def trains_at_all(*, has_length: bool, rounds_per_epoch: int, micro: int, accumulation: int) -> bool:
    """Stock runs forever on a stream shorter than one optimizer step."""
    return has_length or rounds_per_epoch * micro >= accumulation


@given(
    start_step=st.one_of(st.just(0), st.integers(1, 20)),
    skip=st.booleans(),
    leftover=st.integers(0, 3),
    pieces=st.integers(0, 10**6),
    **SIZES,
)
@example(start_step=3, skip=True, max_steps=4, has_length=False, **EXAMPLE)
@example(start_step=3, skip=True, max_steps=4, has_length=False, **{**EXAMPLE, "rounds_per_epoch": 4})
@example(start_step=1, skip=False, max_steps=3, has_length=True, **EXAMPLE)
def test_source_hands_out_exactly_the_rows_of_stock(
    quota, micro, accumulation, rounds_per_epoch, max_steps, has_length, start_step, skip, leftover, pieces
):
    """From the start or resumed, in an epoch, between two, or inside a round; with `ignore_data_skip` or without.

    The examples are a stream that ends while it is skipped, by a whole round and by one micro-step only: stock then
    starts its next epoch at `start_step`. And an epoch that starts again without skipping, with its micro-steps.
    """
    sizes = {"micro": micro, "accumulation": accumulation}
    assume(trains_at_all(has_length=has_length, rounds_per_epoch=rounds_per_epoch, **sizes))
    chunks = numbered_chunks(rounds_per_epoch, quota)
    plan = plan_of(quota, max_steps=max_steps, skip_trained_rows=skip, **sizes)
    epochs = as_epochs(chunks, leftover % quota)
    source = RowSource(epochs, plan, rounds_per_epoch=rounds_per_epoch if has_length else None, start_step=start_step)
    rows = drain(source, pieces)
    assert [row for _, row in rows] == stock_rows(plan, chunks, has_length=has_length, start_step=start_step)
    assert [group_id for group_id, _ in rows] == list(range(rows[0][0], rows[0][0] + len(rows)) if rows else [])
    assert start_step or rows[0][0] == 0


@given(at=st.integers(1, 20), changed=st.integers(1, 40), handed_out=st.integers(0, 60), **SIZES)
@example(
    quota=2, micro=3, accumulation=1, rounds_per_epoch=9, max_steps=4, has_length=False, at=4, changed=7, handed_out=9
)
@example(  # the steps of an epoch end it before its rows do, inside of a round
    quota=1, micro=3, accumulation=2, rounds_per_epoch=1, max_steps=1, has_length=False, at=1, changed=4, handed_out=0
)
def test_rows_follow_a_callback_that_changes_the_number_of_steps(
    quota, micro, accumulation, rounds_per_epoch, max_steps, has_length, at, changed, handed_out
):
    """Up to the last epoch that training began with; of a stream, an epoch has as many steps as it began with."""
    sizes = {"micro": micro, "accumulation": accumulation, "has_length": has_length}
    assume(trains_at_all(rounds_per_epoch=rounds_per_epoch, **sizes) and at <= max_steps and at <= changed)
    chunks, plan = numbered_chunks(rounds_per_epoch, quota), plan_of(quota, micro, accumulation, max_steps)
    rounds = stock_rounds(chunks, max_steps=max_steps, changes={at: changed}, **sizes)
    wanted = [row for _, chunk in rounds for row in chunk]
    steps_per_epoch = -(-rounds_per_epoch * micro // accumulation)
    source = RowSource(
        as_epochs(chunks),
        replace(plan, epochs=-(-max_steps // steps_per_epoch) if has_length else math.inf),
        rounds_per_epoch=rounds_per_epoch if has_length else None,
    )
    before = source.next_rows(handed_out)
    source.follow(changed)
    rows = [row for _, row in before + drain(source)]
    assert rows[: len(wanted)] == wanted
    assert len(rows) <= max(len(wanted), -(-len(before) // quota) * quota)  # a batch that was begun is completed


def test_too_few_rows_for_a_single_round_are_refused():
    source = RowSource(lambda epoch: iter([{}] * 3), plan_of(4))
    with pytest.raises(ConfigError, match="has 3 rows, .* needs 4 prompts. Add rows, or lower generation_batch_size"):
        source.next_rows(1)


def test_rows_are_read_when_they_are_wanted():
    """A stream may be slow: only the rest of a chunk is read ahead."""
    read = []
    source = RowSource(lambda epoch: ({"row": read.append(i) or i} for i in range(100)), plan_of(4, max_steps=9))
    assert read == []
    assert [row["row"] for _, row in source.next_rows(5)] == list(range(5)) and read == list(range(8))


@given(
    start_step=st.one_of(st.just(0), st.integers(1, 8)),
    seed=st.integers(0, 10**9),
    factor=st.sampled_from([1.0, 1.5, 2.0]),
    **SIZES,
)
@example(start_step=0, seed=0, factor=2.0, max_steps=4, has_length=True, **{**RULE_9, "quota": 2, "micro": 2})
@example(start_step=2, seed=0, factor=1.0, max_steps=3, has_length=False, **RULE_9)
def test_training_ends_with_an_empty_pool_and_every_row_trained_as_often_as_in_stock(
    start_step, seed, factor, quota, micro, accumulation, rounds_per_epoch, max_steps, has_length
):
    """With the staleness guarantee on: policy versions are those that stock would have, also when resuming.

    The examples are the short optimizer step at the end of an epoch, which is a version too, and a resumed epoch whose
    last round reaches over its end, where steps count anew.
    """
    rng = random.Random(seed)
    sizes = {"micro": micro, "accumulation": accumulation, "has_length": has_length}
    assume(trains_at_all(rounds_per_epoch=rounds_per_epoch, **sizes))
    chunks, plan = numbered_chunks(rounds_per_epoch, quota), plan_of(quota, micro, accumulation, max_steps)
    rounds = stock_rounds(chunks, max_steps=max_steps, start_step=start_step, **sizes)
    source = RowSource(
        as_epochs(chunks), plan, rounds_per_epoch=rounds_per_epoch if has_length else None, start_step=start_step
    )
    versions = plan.versions_per_round
    pool = Pool(quota, over_provisioning=factor, max_staleness=2 * versions, versions_per_round=versions)
    trained = Counter()
    for version, _ in rounds:
        pool.begin_round(version)
        for group_id, row in source.next_rows(pool.schedule.room):
            pool.admit(group_id, row, [1], num_generations=1, max_completion_length=9)
        unfinished = [group for group in pool if not group.is_finished]
        while not pool.schedule.quota_met:
            assert unfinished, "all admitted groups are finished, and they fill no batch"
            complete(pool, unfinished.pop(rng.randrange(len(unfinished))))
        trained.update(group.row["row"] for group in pool.take())
        pool.check()
    assert len(pool) == 0
    assert source.next_rows(1) == []
    assert trained == Counter(row["row"] for _, chunk in rounds for row in chunk)


# Replacements for rejected groups


def plain_source(rows: int, *, max_steps: int = 3) -> RowSource:
    """Rows 0, 1, 2, ... in every epoch; two rows and one optimizer step per round."""
    epochs = as_epochs(numbered_chunks(rows // 2, 2))
    return RowSource(epochs, plan_of(2, max_steps=max_steps), rounds_per_epoch=rows // 2)


def positions(rows: list) -> list[tuple[int, int]]:
    return [row["row"] for _, row in rows]


def test_rejected_groups_are_replaced_by_the_rows_after_the_planned_rows():
    """Also by rows of the next epochs. A replacement can be undone until it is handed out."""
    source = plain_source(4, max_steps=2)
    assert len(source.next_rows(100)) == 4  # two rounds of two
    source.replace(8)
    assert source.take_back(2) == 0
    rows = source.next_rows(100)
    assert positions(rows) == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1)]
    assert [group_id for group_id, _ in rows] == [4, 5, 6, 7, 8, 9]
    assert source.next_rows(1) == [] and source.take_back(1) == 1


def test_dataset_without_rows_for_a_replacement_is_refused():
    rows = iter([{"row": 0}, {"row": 1}])
    source = RowSource(lambda epoch: rows, plan_of(2))
    assert len(source.next_rows(2)) == 2
    source.replace(1)
    with pytest.raises(ConfigError, match="1 rejected groups have to be replaced"):
        source.next_rows(1)


# Continuing after the rows of a checkpoint


def test_source_delegates_rows_and_keeps_its_count():
    counted, read = plain_source(4, max_steps=3), plain_source(10, max_steps=1)
    counted.next_rows(2)
    read.read_past(1)
    counted.delegate_to(read)
    rows = counted.next_rows(100)
    assert [group_id for group_id, _ in rows] == [2, 3, 4, 5]
    assert positions(rows) == [(0, i) for i in (1, 2, 3, 4)]  # also beyond the step that `read` was planned for
    assert counted.state_dict() == read.state_dict() and counted.state_dict()["handed_out"] == 5
    counted.replace(1)
    assert positions(counted.next_rows(100)) == [(0, 5)]


# Resuming

# quota, uses of a batch, gradient_accumulation_steps, rows
RESUMED = [(2, 1, 2, 7), (2, 1, 1, 6), (2, 1, 3, 5), (1, 1, 2, 3)]


class Interrupted:
    """The rows of a run before and after a checkpoint, and the expected ones."""

    def __init__(self, sizes: Sequence[int], is_stream: bool, max_steps: int = 6) -> None:
        self.quota, uses, self.accumulation, rows = sizes
        self.micro, self.max_steps, self.is_stream = self.quota * uses, max_steps, is_stream
        self.plan = plan_of(self.quota, self.micro, self.accumulation, max_steps)
        self.rows = (stream_rows if is_stream else permuted_rows)(rows, self.plan)
        self.rounds_per_epoch = rows // self.quota
        _, open_epoch = self.rows.open(self.plan)
        self.epochs = [self.numbers(open_epoch(epoch)) for epoch in range(1 + 4 * max_steps)]
        self.endless = [number for epoch in self.epochs for number in epoch]
        self.planned = len(self.stock_from(0))

    def numbers(self, refs) -> list[int]:
        return [self.rows.read(ref)["number"] for ref in refs]

    def chunks(self, epoch: int) -> list[list[int]]:
        return [self.epochs[epoch][i : i + self.quota] for i in range(0, len(self.epochs[epoch]), self.quota)]

    def stock_from(self, step: int) -> list[int]:
        """The rows that stock GRPO generates for, resumed at `step`."""
        return stock_rows(self.plan, self.chunks, has_length=not self.is_stream, start_step=step)

    def trained_by(self, step: int) -> int:
        """Rows of the batches that an undisturbed run has fully trained by then."""
        per_epoch = self.rounds_per_epoch * self.micro
        steps_per_epoch = per_epoch // self.accumulation
        if not self.is_stream and per_epoch % self.accumulation:
            steps_per_epoch += 1
        epochs, steps = divmod(step, steps_per_epoch)
        if steps == 0 and self.is_stream:  # a step ends before the leftover of an epoch
            epochs, steps = epochs - 1, steps_per_epoch
        return (epochs * per_epoch + min(steps * self.accumulation, per_epoch)) // self.micro * self.quota

    def cursor(self, handed_out: int, rejected: int = 0) -> dict[str, int]:
        source = make_source(self.rows, self.plan, 0)
        source.replace(rejected)
        assert self.numbers(row for _, row in source.next_rows(handed_out)) == self.endless[:handed_out]
        return source.state_dict()

    def resumed(self, step: int, cursor: dict, *, held: int, rejected: int = 0) -> tuple[list[int], int]:
        """The rows after resuming, and the number of groups in flight that training cannot use."""
        source, unused = resumed_source(self.rows, self.plan, step, cursor, held=held, rejected=rejected, next_id=1000)
        rows = drain(source, step)
        assert [group_id for group_id, _ in rows] == list(range(1000, 1000 + len(rows)))
        return self.numbers(row for _, row in rows), unused


def collate(rows: list[dict]) -> list[dict]:
    return rows


def rows_of(rows: int) -> Dataset:
    return Dataset.from_dict({"prompt": [f"p{i}" for i in range(rows)], "number": list(range(rows))})


def stream_of(rows: int) -> IterableDataset:
    return rows_of(rows).to_iterable_dataset(num_shards=2)


def permuted_rows(rows: int, plan: TrainingPlan) -> TrainingRows:
    sizes = (plan.num_generations, plan.groups_per_round, plan.micro_steps_per_round)
    return TrainingRows(rows_of(rows), collate, lambda: RepeatSampler(range(rows), *sizes, shuffle=True, seed=3))


def stream_rows(rows: int, plan: TrainingPlan) -> TrainingRows:
    return TrainingRows(
        SharedStream(stream_of(rows).shuffle(seed=3), plan.groups_per_round), collate, lambda: iter(())
    )


@pytest.fixture(params=[(sizes, is_stream) for sizes in RESUMED for is_stream in (False, True)], ids=str)
def interrupted(request) -> Interrupted:
    return Interrupted(*request.param)


@pytest.mark.parametrize("rejected", [0, 3])
def test_rows_before_and_after_a_checkpoint_are_those_of_an_undisturbed_run(interrupted, rejected):
    """Exhaustively: every step, also inside a batch, and every number of groups in flight, also in the next epoch.

    After it, as many rows are handed out as stock GRPO, resumed there, would need besides those in flight.
    """
    even = interrupted.micro % interrupted.accumulation == 0
    for step in range(1, interrupted.max_steps):
        trained, needed = interrupted.trained_by(step), len(interrupted.stock_from(step))
        for handed_out in range(trained + rejected, interrupted.planned + rejected + 1):
            held = handed_out - trained - rejected
            cursor = interrupted.cursor(handed_out, rejected)
            after, unused = interrupted.resumed(step, cursor, held=held, rejected=rejected)
            where = f"step {step}, {handed_out} handed out"
            assert after == interrupted.endless[handed_out:][: max(0, needed - held)], where
            if held <= needed and not rejected:
                assert unused == 0, where
            if even and step * interrupted.accumulation % interrupted.micro == 0:
                assert handed_out + len(after) == interrupted.planned + rejected, where


def test_epoch_starts_again_without_skipping(interrupted):
    """`ignore_data_skip`: the rows in flight are trained instead of the first ones; of a stream, which may have no
    more of those that are passed over, instead of the last ones."""
    cursors = {handed_out: interrupted.cursor(handed_out) for handed_out in range(interrupted.planned + 1)}
    interrupted.plan = replace(interrupted.plan, skip_trained_rows=False)
    for step in range(1, interrupted.max_steps):
        expected = interrupted.stock_from(step)
        for held in range(0, min(interrupted.planned, len(expected)) + 1, 3):
            rest = expected[: len(expected) - held] if interrupted.is_stream else expected[held:]
            assert interrupted.resumed(step, cursors[held], held=held) == (rest, 0), f"step {step}, {held}"


def test_changed_batch_size_counts_steps_of_the_new_size(interrupted):
    """As in stock GRPO; rows in flight are not read again."""
    changes = "groups_per_round", "micro_steps_per_round", "gradient_accumulation_steps"
    for step, change in enumerate(changes, 1):
        cursor = interrupted.cursor(interrupted.quota)
        cursor[change] += 1
        expected = interrupted.stock_from(step)
        for held in (0, 1, len(expected), len(expected) + 2):
            after, unused = interrupted.resumed(step, cursor, held=held)
            assert (after, unused) == (expected[held:], max(0, held - len(expected))), f"{change}, step {step}"


def test_cursor_of_a_later_run_is_refused():
    """Without reading a row: it may name any number of steps."""
    interrupted = Interrupted((1, 1, 1, 5), is_stream=False)
    cursor = {**interrupted.cursor(0), "origin": 10**12}
    with pytest.raises(CheckpointError, match="began at step 1000000000000, .* weights are of step 3"):
        interrupted.resumed(3, cursor, held=0)


# The order of TRL, by its own trainer


@pytest.fixture(scope="module")
def model_and_tokenizer():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of so small a model only wait for each other
    yield build_model(), build_tokenizer()
    torch.set_num_threads(threads)


@pytest.fixture
def make_trainer(model_and_tokenizer, tmp_path) -> Callable[..., APRILGRPOTrainer]:
    return partial(recording_trainer, model_and_tokenizer, tmp_path)


def recording_trainer(model_and_tokenizer, output_dir: Path, dataset, **options) -> APRILGRPOTrainer:
    """A trainer that records its generations as `(global step, prompts)`. With a `rollout_func` it runs stock GRPO."""
    model, tokenizer = model_and_tokenizer
    generations = []

    def rollout(prompts, trainer):
        generations.append((trainer.state.global_step, prompts[:: trainer.num_generations]))
        return {
            "prompt_ids": [[5, 6]] * len(prompts),
            "completion_ids": [[7, 2]] * len(prompts),
            "logprobs": [[-1.0, -1.0]] * len(prompts),
        }

    args = {
        "use_vllm": False, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "num_generations": 2,
        "per_device_train_batch_size": 2, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "learning_rate": 0.0, **options,
    }  # fmt: skip
    trainer = APRILGRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **kwargs: [float(i % 2) for i in range(len(completions))],
        args=APRILGRPOConfig(str(output_dir), **args),
        train_dataset=dataset,
        rollout_func=rollout,
    )
    trainer.generations = generations
    return trainer


def rows_of_trainer(trainer: APRILGRPOTrainer) -> TrainingRows:
    """As in training, when nothing is skipped."""
    step, trainer.state.global_step = trainer.state.global_step, 0
    with read_once(trainer):
        rows = training_rows(trainer)
        rows.columns()
    trainer.state.global_step = step
    return rows


def plan_of_trainer(trainer: APRILGRPOTrainer, **values) -> TrainingPlan:
    plan = TrainingPlan.of(trainer.args, max_steps=trainer.state.max_steps, vocab_size=99)
    return replace(plan, **values)


@pytest.mark.parametrize("dataset", [stream_of(4), rows_of(4)], ids=["stream", "map"])
def test_rows_come_through_the_collator_with_the_columns_that_trl_keeps(make_trainer, dataset):
    for remove, columns in ((True, ["prompt"]), (False, ["number", "prompt"])):
        trainer = make_trainer(dataset, max_steps=1, remove_unused_columns=remove)
        rows = rows_of_trainer(trainer)
        _, open_epoch = rows.open(plan_of_trainer(trainer))
        assert sorted(rows.columns()) == sorted(rows.read(next(open_epoch(0)))) == columns
    trainer.data_collator = lambda rows: [{"prompt": f"Be brief. {row['prompt']}", "level": 1} for row in rows]
    rows = rows_of_trainer(trainer)
    _, open_epoch = rows.open(plan_of_trainer(trainer))
    row = rows.read(next(open_epoch(0)))
    assert row["prompt"].startswith("Be brief. p")
    assert rows.columns() == ["prompt", "level"] == list(row)


@pytest.mark.parametrize(("times", "rounds"), [(0.5, 4), (3, 24)])
def test_sampler_of_another_length_has_other_epochs(times, rounds):
    """The sampler of a subclass may repeat rows or leave some out."""
    indices = (list(range(8)) * math.ceil(times))[: round(8 * times)]
    plan = plan_of(num_generations=1, max_steps=99)
    dataset = TrainingRows(rows_of(8), collate, lambda: indices)
    number, open_epoch = dataset.open(plan)
    assert number == rounds == len(list(open_epoch(0)))
    for step, epoch in ((rounds - 1, 0), (rounds, 1)):
        assert make_source(dataset, plan, step)._epoch == epoch


RUNS = {
    "short last step": {"rows": 3, "max_steps": 7, "steps_per_generation": 3, "gradient_accumulation_steps": 2},
    "iterations, not shuffled": {"rows": 5, "max_steps": 9, "num_iterations": 3, "shuffle_dataset": False},
    "stream": {"rows": 4, "max_steps": 5, "steps_per_generation": 2, "gradient_accumulation_steps": 3},
}


@pytest.mark.parametrize("run", RUNS)
def test_source_gives_the_rows_that_stock_trains_on(make_trainer, run):
    options = dict(RUNS[run])
    rows = options.pop("rows")
    trainer = make_trainer((stream_of if run == "stream" else rows_of)(rows), seed=3, **options)
    trainer.train()
    check_source_of(trainer)


@pytest.mark.parametrize(("streaming", "skip"), [(False, True), (True, True), (True, False)])
def test_source_gives_the_rows_that_stock_trains_on_after_resuming(make_trainer, tmp_path, streaming, skip):
    """Resumed inside the first epoch and inside a round, which stock generates anew."""
    options = {"max_steps": 9, "steps_per_generation": 2, "seed": 3, "ignore_data_skip": not skip}
    dataset = stream_of(16) if streaming else rows_of(16)
    make_trainer(dataset, save_strategy="steps", save_steps=5, save_only_model=False, **options).train()
    resumed = make_trainer(dataset, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert resumed.generations[0][0] == 5
    check_source_of(resumed, start_step=5)


def check_source_of(trainer: APRILGRPOTrainer, start_step: int = 0) -> None:
    """The generations of a stock run are those of the source and of the reference."""
    plan, rows = plan_of_trainer(trainer), rows_of_trainer(trainer)
    quota = plan.groups_per_round
    assert trainer.state.global_step == trainer.state.max_steps
    source = make_source(rows, plan, start_step)
    generated = [prompt for _, prompts in trainer.generations for prompt in prompts]
    assert [rows.read(row)["prompt"] for _, row in drain(source)] == generated

    _, open_epoch = rows.open(plan)
    epochs = [[rows.read(row)["prompt"] for row in open_epoch(epoch)] for epoch in range(2 + plan.max_steps)]

    def chunks(epoch: int) -> list:
        return [epochs[epoch][i : i + quota] for i in range(0, len(epochs[epoch]), quota)]

    assert trainer.generations == stock_rounds_of(plan, chunks, has_length=not rows.is_stream, start_step=start_step)

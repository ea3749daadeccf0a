"""Training with a rollout function, whose completions a fake server has as a script."""

from __future__ import annotations

import pytest
from datasets import Dataset

from tests.support.fake_vllm import FakeVLLM
from tests.support.tool_calling import END, HEADER, TOKENIZER, ToolScript, encode, multiply
from tests.trainer.test_tools import april
from trl_april.errors import ConfigError


pytestmark = pytest.mark.usefixtures("one_thread")
FOLLOW_UP = encode("\n<|im_start|>user\nAre you sure?<|im_end|>\n") + HEADER
TURNS = [["Yes." + END, "Quite." + END], ["No" * 20 + END, "Never." + END], ["Hm." + END, "x" * 40 + END]]
LENGTHS = [[len(encode(text)) for text in sample] for sample in TURNS]


async def ask_again(prompt, engine, row):
    token_ids, lengths = [*engine.prompt_ids], []
    assert token_ids == TOKENIZER.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
    for _ in TURNS[0]:
        turn = await engine.generate(token_ids)
        lengths.append(len(turn.token_ids))
        token_ids += [*turn.token_ids, *FOLLOW_UP]
    return {"lengths": lengths}


def reward(completions, lengths, number, **kwargs):
    """Depends on the text of the completion, on a column of the rollout, and on one of the dataset."""
    return [
        len(messages[0]["content"]) + sum(one) / 1000 + row
        for messages, one, row in zip(completions, lengths, number, strict=True)
    ]


def trainer_of(fake, folder, **options):
    prompts = [{"prompt": [{"role": "user", "content": f"q{number}"}], "number": number} for number in range(8)]
    given = {"rollout": ask_again, "tools": None, "reward_funcs": reward, "train_dataset": Dataset.from_list(prompts)}
    sizes = {"per_device_train_batch_size": len(TURNS), "num_generations": len(TURNS), "shuffle_dataset": False}
    given |= options.pop("arguments", {})
    return april(
        fake, folder, **{"arguments": given, "stream_interval": 3, "over_provisioning": 2.0, **sizes, **options}
    )


@pytest.fixture
def fake():
    with FakeVLLM(vocab_size=len(TOKENIZER), script=ToolScript(TURNS, seconds_per_chunk=0.01).stream) as server:
        yield server


def checked_batches(trainer, count):
    """Every sample has its turns, and what the rollout added is masked. Returns the rows of the batches."""
    assert len(trainer.batches) == count
    rows = []
    for batch in trainer.batches:
        for number, (ids, mask, loss_mask) in enumerate(
            zip(batch["completion_ids"], batch["completion_mask"], batch["tool_mask"], strict=True)
        ):
            start, end = map(encode, TURNS[number])
            assert ids[mask.bool()].tolist() == [*start, *FOLLOW_UP, *end]
            assert loss_mask[mask.bool()].tolist() == [1] * len(start) + [0] * len(FOLLOW_UP) + [1] * len(end)
        (row,) = {TOKENIZER.decode(ids).split("q")[1][0] for ids in batch["prompt_ids"]}
        rows.append(int(row))
    return rows


@pytest.mark.parametrize("options", [{}, {"dynamic_sampling": True, "overlap_generation": False}])
def test_every_sample_has_its_turns_masks_and_columns(fake, tmp_path, options):
    trainer = trainer_of(fake, tmp_path, max_steps=4, **options)
    trainer.train()
    rows = checked_batches(trainer, 4)
    assert len({*rows}) == 4
    text = [
        len("".join(TURNS[number]).replace(END, "")) + len("\nuser\nAre you sure?\nassistant\n") for number in range(3)
    ]
    for row, entry in zip(rows, trainer.state.log_history[:4], strict=True):
        expected = sum(length + sum(one) / 1000 for length, one in zip(text, LENGTHS, strict=True)) / 3 + row
        assert entry["reward"] == pytest.approx(expected, rel=1e-5)
        assert entry["april/restarted_samples"] == 0
    if not options.get("overlap_generation", True):  # otherwise they may finish during training
        assert sum(entry["april/groups_resumed"] for entry in trainer.state.log_history[:4]) > 0


@pytest.mark.parametrize(
    ("arguments", "factor"), [({}, 6.0), ({"rollout": None, "tools": [multiply]}, 6.0), ({"rollout": None}, 3.0)]
)
def test_more_groups_are_in_flight_by_default_where_samples_act(fake, tmp_path, arguments, factor):
    trainer = trainer_of(fake, tmp_path, arguments=arguments, over_provisioning=None)
    assert trainer._april_options.over_provisioning == factor


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arguments": {"rollout": 3}}, "must be a function or the command line of a program"),
        ({"arguments": {"tools": [reward]}}, "together with tools or environment_factory"),
        ({"use_vllm": False}, "APRIL is off: .*use_vllm"),
    ],
)
def test_what_a_rollout_function_cannot_be_combined_with_is_refused(fake, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        trainer_of(fake, tmp_path, **changes)

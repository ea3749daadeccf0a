"""Example scripts: the tools, the data, the rewards, and a step of training on the fake server."""

import runpy
from itertools import pairwise

import pytest
import torch

from tests.support.docs_pages import ROOT
from tests.support.fake_vllm import FakeVLLM
from tests.support.tiny import build_chat_tokenizer, build_model
from tests.support.tool_calling import END, TOKENIZER, ToolScript, call
from trl_april.weights.canary import trainer_logprobs


CALCULATOR, GUESS = (runpy.run_path(str(ROOT / "scripts" / f"{name}.py")) for name in ("calculator", "guess"))


def test_the_tool_calculates_and_runs_no_code():
    assert CALCULATOR["calculate"]("2 + 3 * -(4 - 1)") == "-7"
    for expression in ("__import__('os')", "2 ** 9", "1.5 + 1", "'a' * 3"):
        with pytest.raises(ValueError, match="only integers"):
            CALCULATOR["calculate"](expression)


def test_the_reward_is_the_last_word_of_the_last_message():
    completions = [[{"content": text}] for text in ("It is 12", "12 it is", "")]
    assert CALCULATOR["is_right"](completions, ["12", "12", "12"]) == [1.0, 0.0, 0.0]


def test_pictures_have_as_many_squares_as_their_answers_say():
    squares = runpy.run_path(str(ROOT / "scripts" / "squares.py"))
    rows = squares["problems"](4)
    assert rows["answer"] == squares["problems"](4)["answer"] and len(set(rows["answer"])) > 1
    for row in rows:
        size = sum(count for count, colour in row["image"].getcolors() if colour != (255, 255, 255))
        assert size == 29 * 29 * int(row["answer"])
    assert squares["is_right"]([[{"content": "So 3"}]], ["3"]) == [1.0]


def test_puzzles_are_scored_by_their_own_rules_and_run_no_code(tmp_path):
    script = runpy.run_path(str(ROOT / "scripts" / "puzzles.py"))
    puzzles = script["Puzzles"](["chain_sum", "countdown"], count=8)
    rows = puzzles.rows
    assert rows["prompt"] == script["Puzzles"](["chain_sum", "countdown"], count=8).rows["prompt"]
    entries = [puzzles.tasks[task][index] for task, index in zip(rows["task"], rows["index"], strict=True)]
    assert all(entry["question"] in row["prompt"][0]["content"] for entry, row in zip(entries, rows, strict=True))

    def scores(texts):
        return puzzles.score([[{"content": text}] for text in texts], rows["task"], rows["index"])

    assert scores([f"So.\nAnswer: {entry['answer']}" for entry in entries]) == [1.0] * 16
    assert scores([entry["answer"] for entry in entries]) == [0.0] * 16
    touched = tmp_path / "touched"
    code = f"Answer: __import__('pathlib').Path({str(touched)!r}).touch()"
    assert max(scores([code] * 16)) < 1.0 and not touched.exists()
    assert scores(["Answer: 9**9**9**9"] * 16) == [0.0] * 16  # and comes back


def test_the_game_rewards_few_guesses_and_continues_where_it_was():
    game, rewards = GUESS["Game"](), []
    for guesses in ([700], [5, 700], [900, 5, 700], [690], [5], []):
        game.reset(number=700)
        answers = [game.guess(number) for number in guesses]
        rewards.append(game.get_reward())
        other = GUESS["Game"]()
        other._april_restore(game._april_state())
        assert vars(other) == vars(game)
    assert answers == [] and rewards[0] == 1 and all(more > less for more, less in pairwise(rewards))
    assert [game.guess(number) for number in (5, 900, 700)] == ["Higher.", "Lower.", "Right."]
    with pytest.raises(ValueError, match="an integer"):
        game.guess("5")


@pytest.mark.parametrize(
    ("script", "made"), [(CALCULATOR, call("calculate", expression="6 * 7")), (GUESS, call("guess", number=500))]
)
def test_a_step_of_training(tmp_path, one_thread, script, made):
    model = build_model(vocab_size=len(TOKENIZER))
    for part in (model, build_chat_tokenizer()):
        part.save_pretrained(tmp_path / "model")
    with FakeVLLM(
        vocab_size=len(TOKENIZER), script=ToolScript([[made + END, "42" + END], ["No." + END]]).stream
    ) as fake:
        fake.prompt_logprobs = lambda ids: trainer_logprobs(model, ids, torch.device("cpu"))
        options = {
            "vllm_server_base_url": fake.base_url, "output_dir": tmp_path / "out", "max_steps": 1, "bf16": False,
            "use_cpu": True, "num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 300,
            "report_to": "none", "save_strategy": "no", "logging_steps": 1,
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        trainer = script["main"]([str(tmp_path / "model"), *words])
    (entry, _) = trainer.state.log_history
    assert trainer.april_enabled and (entry["tools/call_frequency"], entry["tools/failure_frequency"]) == (0.5, 0.0)

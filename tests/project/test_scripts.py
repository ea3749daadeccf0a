"""Example scripts: the tools, the data, the rewards, and a step of training on the fake server."""

import random
import runpy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.support.docs_pages import ROOT
from tests.support.fake_vllm import FakeVLLM
from tests.support.tiny import build_chat_tokenizer, build_model
from tests.support.tool_calling import END, TOKENIZER, ToolScript, call
from trl_april.weights.canary import trainer_logprobs


CALCULATOR, GAMES = (runpy.run_path(str(ROOT / "scripts" / f"{name}.py")) for name in ("calculator", "games"))


def test_the_tool_calculates_and_runs_no_code():
    assert CALCULATOR["calculate"]("2 + 3 * -(4 - 1)") == "-7"
    for expression in ("__import__('os')", "2 ** 9", "1.5 + 1", "'a' * 3"):
        with pytest.raises(ValueError, match="only integers"):
            CALCULATOR["calculate"](expression)


def test_pictures_have_as_many_squares_as_their_answers_say():
    squares = runpy.run_path(str(ROOT / "scripts" / "squares.py"))
    rows = squares["problems"](4)
    assert rows["answer"] == squares["problems"](4)["answer"] and len(set(rows["answer"])) > 1
    for row in rows:
        size = sum(count for count, color in row["image"].getcolors() if color != (255, 255, 255))
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


def test_a_game_is_repeated_by_its_seed_and_moves_in_any_thread():
    def play(seed):
        game = GAMES["Game"]("Mastermind-v0")
        observation = game.reset(seed=seed)
        said = [game.play(code) for code in ("[1 2 3 4]", "[3 4 5 6]", "[1 3 5 2]")]
        return observation, said, game.get_reward()

    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(play, [*range(20)] * 5))
    assert together == [play(seed) for seed in range(20)] * 5
    assert len({str(said) for _, said, _ in together}) > 1
    random.seed(0)
    expected = random.random()
    random.seed(0)
    play(3)
    assert random.random() == expected  # of everybody else


def test_a_game_has_a_reward_when_it_is_over():
    game = GAMES["Game"]("GuessTheNumber-v0")
    assert "between 1 and 20" in game.reset(seed=0)
    low, high = 1, 20
    while (said := game.play(f"[{(low + high) // 2}]")) != "The game is over.":
        assert game.get_reward() == 0
        low, high = ((low + high) // 2 + 1, high) if "higher" in said else (low, (low + high) // 2 - 1)
    assert game.get_reward() == 1
    with pytest.raises(ValueError, match="the game is over"):
        game.play("[20]")
    game.reset(seed=0)
    assert "invalid move" in game.play("twenty") and game.get_reward() == 0
    assert game.play("twenty") == "The game is over."


@pytest.mark.parametrize(
    ("script", "names", "made"),
    [
        (CALCULATOR, [], call("calculate", expression="6 * 7")),
        (GAMES, ["GuessTheNumber-v0"], call("play", move="[7]")),
    ],
)
def test_a_step_of_training(tmp_path, one_thread, script, names, made):
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
        trainer = script["main"]([str(tmp_path / "model"), *names, *words])
    (entry, _) = trainer.state.log_history
    assert trainer.april_enabled and (entry["tools/call_frequency"], entry["tools/failure_frequency"]) == (0.5, 0.0)

"""Agents of other libraries, which know an OpenAI-compatible address and nothing of training."""

from __future__ import annotations

import re
import runpy

import pytest

from tests.agents.agent_runs import HEADER_TEXT, Model, ask, client, new_pool, outcome, play, question, result, resumed
from tests.support.docs_pages import ROOT
from tests.support.tool_calling import END, TOKENIZER, call, multiply


def test_an_agent_of_langgraph(acts):
    prebuilt, openai = pytest.importorskip("langgraph.prebuilt"), pytest.importorskip("langchain_openai")

    def rollout(prompt, engine, row):
        model = openai.ChatOpenAI(model="m", base_url=engine.base_url, api_key=engine.api_key, max_retries=0)
        agent = prebuilt.create_react_agent(model, [multiply])
        messages = agent.invoke({"messages": [("user", "call 3 4")]})["messages"]
        return {"answer": messages[-1].content, "messages": len(messages)}

    pool = new_pool()
    play(pool, acts(rollout), piece=13)
    ((prompt, text, *_, columns),) = outcome(pool)
    assert "Multiplies two numbers" in prompt
    assert text == (
        "I call.\n" + call("multiply", a=3, b=4) + END + result(12) + "Re: <tool_response>\n12\n</tool_response>" + END
    )
    assert columns["messages"] == 4 and pool.counters.tokens_branched == 0


class ToolCaller(Model):
    """Answers as agents of smolagents are asked to: with a call in every turn, the last of them `final_answer`."""

    @staticmethod
    def turn(question):
        if found := re.search(r"call (\d+) (\d+)", question):
            return "I call.\n" + call("multiply", a=int(found[1]), b=int(found[2])) + END
        (number,) = re.findall(r"\d+", question)[-1:]
        return call("final_answer", answer=number) + END


class Coder(Model):
    @staticmethod
    def turn(question):
        if found := re.search(r"call (\d+) (\d+)", question):
            return f"Thought: I multiply.\n<code>\nx = multiply({found[1]}, {found[2]})\nprint(x)\n</code>" + END
        return "Thought: Done.\n<code>\nfinal_answer(x)\n</code>" + END


@pytest.mark.parametrize(("kind", "model"), [("ToolCallingAgent", ToolCaller), ("CodeAgent", Coder)])
def test_an_agent_of_smolagents(acts, kind, model):
    smolagents = pytest.importorskip("smolagents")

    def rollout(prompt, engine, row):
        options = {"tool_choice": "auto"} if kind == "ToolCallingAgent" else {}
        served = smolagents.OpenAIModel("m", api_base=engine.base_url, api_key=engine.api_key, **options)
        agent = getattr(smolagents, kind)([smolagents.tool(multiply)], served, max_steps=4, verbosity_level=0)
        return {"answer": str(agent.run("call 3 4"))}

    pool = new_pool(budget=3000, context_length=20_000)
    stop = ["Observation:", "Calling tools:", *(["</code>"] if kind == "CodeAgent" else [])]
    play(pool, acts(rollout, stop=stop), model(), piece=50)
    ((prompt, text, *_, columns),) = outcome(pool)
    assert columns == {"answer": "12"}
    # It writes the calls of an answer as text after it. That is a message of its own, and both turns are trained.
    assert pool.counters.tokens_branched == 0 and text.count(END) == 4
    first, second, third = text.split(HEADER_TEXT)
    assert "multiply(3, 4)" in first or '"multiply"' in first
    assert second.startswith("Calling tools:\n[{'id': 'call") and "\n12" in second and "final_answer" in third


def test_the_example_is_an_agent(acts):
    script = runpy.run_path(str(ROOT / "scripts" / "agent.py"))

    class Calculator(Model):
        @staticmethod
        def turn(question):
            if found := re.search(r"What is (\d+) \* (\d+)", question):
                return call("multiply", a=int(found[1]), b=int(found[2])) + END
            return "It is " + re.findall(r"\d+", question)[-1] + END

    (row,) = script["problems"](1).to_list()
    pool = new_pool()
    pool._groups[0].row.update(row)
    play(pool, acts(script["agent"]), Calculator(), piece=11)
    (columns,) = (sample.conversation.columns for group in pool for sample in group.samples)
    assert script["is_right"]([columns["last"]], [row["answer"]]) == [1.0] and pool.counters.tokens_branched == 0


def test_a_game_of_textarena_comes_back_from_a_checkpoint(acts):
    """The agent plays by messages. Seed and recorded moves bring the game back."""
    games = runpy.run_path(str(ROOT / "scripts" / "games.py"))

    class Bisection(Model):
        """Guesses by the answers so far."""

        def rest(self, token_ids, index=0):
            text = TOKENIZER.decode(token_ids)
            self.low, self.high = 1, 20
            for guess, answer in re.findall(r"\[(\d+)\]<\|im_end\|>\n<\|im_start\|>user\n(.*?)<", text, re.DOTALL):
                if "higher" in answer:
                    self.low = int(guess) + 1
                elif "lower" in answer:
                    self.high = int(guess) - 1
            return super().rest(token_ids, index)

        def turn(self, question):
            return f"[{(self.low + self.high) // 2}]" + END

    def player(prompt, engine, row):
        game = games["Game"]("GuessTheNumber-v0")
        messages = question(game.reset(seed=5))
        with client(engine) as api:
            while not game._is_over:
                move = ask(api, messages).message.content
                messages += [{"role": "assistant", "content": move}, *question(game.play(move))]
        return {"score": game.get_reward(), "moves": len(messages) // 2}

    whole = new_pool(budget=3000, context_length=9000)
    play(whole, acts(player), Bisection())
    assert outcome(whole)[0][-1]["score"] > 0 and outcome(whole)[0][-1]["moves"] > 2
    pool, model = new_pool(budget=3000, context_length=9000), Bisection()
    play(pool, acts(player), model, piece=2, most=4)
    again = acts(player)
    pool = resumed(pool, again)
    play(pool, again, model)
    assert outcome(pool) == outcome(whole) and again.take_restored() == (1, 0)

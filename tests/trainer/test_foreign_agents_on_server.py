"""Agents of LangGraph and smolagents on the real server, with a model that was taught what they expect."""

from __future__ import annotations

import pytest
import smolagents
import torch
from datasets import Dataset
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from openai import BadRequestError

from tests.agents.agent_runs import Model, new_pool, play, question, rollout_turns
from tests.agents.test_foreign_agents import ToolCaller
from tests.support.tiny import build_chat_tokenizer, build_model
from tests.support.tool_calling import TOKENIZER, multiply
from tests.trainer.test_trainer import RecordingTrainer, check_logprobs, make_config, wait_until_idle
from trl_april.server.local import LocalServer


pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(900)]
TASK = "call 3 4"
ROWS = Dataset.from_list([{"prompt": question(f"q{number}")} for number in range(16)])
CONTEXT = 4096
STOP = ["Observation:", "Calling tools:"]  # which smolagents sends with each request


def langgraph(prompt, engine, row):
    model = ChatOpenAI(model="m", base_url=engine.base_url, api_key=engine.api_key, max_retries=0)
    try:
        messages = create_react_agent(model, [multiply]).invoke({"messages": [("user", TASK)]})["messages"]
    except BadRequestError as error:
        assert error.code == "context_length_exceeded"
        return {"answer": ""}
    return {"answer": messages[-1].content}


def smolagent(prompt, engine, row):
    served = smolagents.OpenAIModel(
        "m", api_base=engine.base_url, api_key=engine.api_key, tool_choice="auto", max_tokens=200
    )
    agent = smolagents.ToolCallingAgent([smolagents.tool(multiply)], served, max_steps=3, verbosity_level=0)
    agent.prompt_templates["system_prompt"] = "Call tools, and final_answer last."
    try:
        return {"answer": str(agent.run(TASK))}
    except smolagents.AgentError as error:
        assert error.__cause__.code == "context_length_exceeded"
        return {"answer": ""}


def transcript(rollout, model, stop=()) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation with a scripted model, and which of them are the model's."""
    pool, acts = new_pool(budget=3000, context_length=CONTEXT), rollout_turns(rollout, stop=stop)
    play(pool, acts, model)
    acts.close()
    ((group, sample),) = ((group, sample) for group in pool for sample in group.samples)
    prompt_ids = group.prompt_ids_of(sample)
    return [*prompt_ids, *sample.token_ids], [False] * len(prompt_ids) + [one is not None for one in sample.versions]


@pytest.fixture(scope="module")
def taught(tmp_path_factory, one_thread) -> str:
    """The folder of a model that says most of the time what both agents expect."""
    model = build_model(vocab_size=len(TOKENIZER))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    conversations = [transcript(langgraph, Model()), transcript(smolagent, ToolCaller(), STOP)]
    worst = 1.0
    for _ in range(600):
        if worst < 0.01:
            break
        worst = 0.0
        for ids, is_models in conversations:
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
            loss = losses[torch.tensor(is_models[1:])].mean()
            loss.backward()
            worst = max(worst, float(loss))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert worst < 0.01, f"the loss is still {worst:.3f}"
    folder = tmp_path_factory.mktemp("taught")
    model.save_pretrained(folder)
    build_chat_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def taught_server(taught):
    flags = ["--dtype", "float32", "--max-model-len", str(CONTEXT), "--enforce-eager"]
    with LocalServer(taught, vllm_args=flags, quiet=True) as running:
        yield running


def is_right(answer, **columns):
    return [float("12" in one) for one in answer]


@pytest.mark.parametrize("rollout", [langgraph, smolagent], ids=lambda rollout: rollout.__name__)
def test_every_token_has_the_log_probability_of_its_version(taught_server, taught, tmp_path, rollout):
    args = make_config(
        taught_server, tmp_path, max_steps=4, max_completion_length=1500, over_provisioning=3.0, learning_rate=1e-3,
        per_device_train_batch_size=8, overlap_generation=True,
        generation_kwargs={"stop": STOP} if rollout is smolagent else {},
    )  # fmt: skip
    trainer = RecordingTrainer(taught, is_right, args, ROWS, processing_class=build_chat_tokenizer(), rollout=rollout)
    trainer.train()
    samples = [sample for group in trainer.trained_groups for sample in group.samples]
    assert check_logprobs(trainer) == sum(sample.num_generated for sample in samples)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == 4 and sum(rewards) > 0.5, "the agent was hardly ever understood"
    turns = [sum(segment.version is None for segment in sample.segments) + 1 for sample in samples]
    assert max(turns) > 1 and len({len(sample) for sample in samples}) > 1
    assert (
        trainer.pool.counters.tokens_taken
        == trainer.pool.counters.tokens_generated - trainer.pool.counters.tokens_branched
    )
    assert len(trainer.pool) == 0 and wait_until_idle(taught_server) == 0

"""The sampling options of requests, and those that are refused because an abort would break them."""

from __future__ import annotations

import pytest

from trl_april.config import APRILGRPOConfig
from trl_april.engine import sampling
from trl_april.engine.sampling import SamplingOptions, sampling_of, sampling_options
from trl_april.errors import ConfigError


CONFIG = {"use_cpu": True, "bf16": False}


def test_options_of_the_config_arrive():
    """Penalties are sent as 0, so that the server's own defaults do not apply."""
    expected = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    expected |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "stop_token_ids": [2]}
    made = sampling_options(None, [2])
    assert made == SamplingOptions(expected, min_tokens=0, seed=None)
    assert sampling_of(APRILGRPOConfig("out", **CONFIG), None, [2]) == made
    changed = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    args = APRILGRPOConfig("out", **CONFIG, **changed)
    assert sampling_of(args, {}, [2]).body == {**expected, **changed}
    assert sampling_of(args, {"temperature": 0.7}, [2]).body == {**expected, **changed}


def test_temperature_of_sampling_alone_is_refused():
    args = APRILGRPOConfig("out", **CONFIG)
    with pytest.raises(ConfigError, match="generation_kwargs sets temperature=0.7, .* Set the option temperature=0.7"):
        sampling_of(args, {"temperature": 0.7})


def test_generation_kwargs_override_and_are_not_changed():
    """Seed and minimum length differ between requests, so they leave the common part."""
    extra = {"temperature": 0.5, "logit_bias": {4: -100}, "seed": 0, "min_tokens": 5}
    given = dict(extra)
    made = sampling_options(given)
    assert (made.body["temperature"], made.body["logit_bias"]) == (0.5, {4: -100})
    assert (made.seed, made.min_tokens) == (0, 5)
    assert not {"seed", "min_tokens"} & made.body.keys()
    assert given == extra


@pytest.mark.parametrize(
    ("stop_token_ids", "generation_kwargs", "expected"),
    [
        ([9, 2], {}, [2, 9]),
        ([2], {"stop_token_ids": [5, 2]}, [2, 5]),
        ([2], {"stop_token_ids": None}, [2]),
        ([None], {}, []),  # a tokenizer without an end token
        ([2], {"ignore_eos": False}, [2]),
        ([2], {"ignore_eos": True}, None),
    ],
)
def test_stop_tokens_of_user_and_model_are_both_sent(stop_token_ids, generation_kwargs, expected):
    made = sampling_options(stop_token_ids=stop_token_ids, generation_kwargs=generation_kwargs)
    assert made.body.get("stop_token_ids") == expected


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("presence_penalty", 0.5, "repetition_penalty"),
        ("frequency_penalty", -0.5, "repetition_penalty"),
        ("bad_words", ["no"], "logit_bias"),
        ("structured_outputs", {"json": {}}, "GRPOTrainer"),
        ("response_format", {"type": "json_object"}, "GRPOTrainer"),
        ("repetition_detection", {"max_pattern_size": 3}, "GRPOTrainer"),
        ("thinking_token_budget", 10, "GRPOTrainer"),
        ("use_beam_search", True, "sampled"),
        ("vllm_structured_outputs_regex", "a+", "GRPOTrainer"),
    ],
)
def test_option_that_a_cut_breaks_is_refused(name, value, remedy):
    with pytest.raises(ConfigError) as caught:
        sampling_options({name: value})
    assert all(word in str(caught.value) for word in (f"{name}={value!r}", "partial rollouts", remedy))


@pytest.mark.parametrize(
    ("name", "off"),
    [("frequency_penalty", None), ("stop", []), ("stop", None), ("use_beam_search", False), ("do_sample", True)],
)
def test_option_that_is_off_is_accepted(name, off):
    assert sampling_options({name: off}) == sampling_options()


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("temprature", 0.2, "did you mean temperature"),
        ("max_new_tokens", 5, "max_completion_length"),
        ("n", 1, "num_generations"),
        ("stream_interval", 8, "APRILGRPOConfig"),
        ("min_new_tokens", 5, "use min_tokens"),
        ("do_sample", False, "rollouts are sampled"),
        ("stop_strings", ["x"], "use stop:"),
        ("wholly_unknown", 1, "leave it out"),
    ],
)
def test_option_that_vllm_would_ignore_is_refused(name, value, remedy):
    with pytest.raises(ConfigError) as caught:
        sampling_options({name: value})
    assert all(word in str(caught.value) for word in (f"{name}={value!r}", remedy.rstrip(":"), "allowed_token_ids"))


def test_every_field_of_vllm_is_passed_on_or_refused():
    """A new field of vLLM's request fails here: pass it on if it survives a cut, otherwise refuse it."""
    protocol = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")
    refused = set(
        """add_special_tokens cache_salt ec_transfer_params echo kv_transfer_params length_penalty logprob_token_ids
        logprobs max_tokens model n priority prompt prompt_embeds prompt_logprobs request_id return_token_ids
        return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start session_id stream stream_interval
        stream_options suffix truncate_prompt_tokens truncation_side user""".split()
    )
    ours = {*sampling._PASSED_ON, *sampling._BROKEN_BY_A_CUT} - {"vllm_structured_outputs_regex"}
    assert ours | refused == set(protocol.CompletionRequest.model_fields) and not ours & refused
    assert not any(ours & set(names) for names in sampling._INSTEAD.values())


@pytest.mark.parametrize("stop", ["", ["a", ""], [5]])
def test_stop_strings_that_vllm_refuses_are_refused(stop):
    with pytest.raises(ConfigError, match=r"stop=.*it must be a non-empty string"):
        sampling_options({"stop": stop})

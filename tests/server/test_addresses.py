"""Addresses of one server and of several, as options give them."""

import pytest
from transformers import HfArgumentParser
from trl import TrlParser

from trl_april.config import APRILGRPOConfig
from trl_april.errors import ConfigError
from trl_april.server.host import server_addresses


A, B = "http://127.0.0.1:8000", "https://gpu-2:8001/served"
PAIR = f"{A},{B}"


@pytest.mark.parametrize("value", [[A, B], (f"{A}/", B), PAIR, f" {A}/ , {B} ", [f"{A} ", f"{B}/"]])
def test_several_addresses_are_a_list_or_a_text_with_commas(value):
    assert server_addresses(value) == [A, B]


@pytest.mark.parametrize("value", [A, f"{A}/", "http://[::1]:8000", "no address at all"])
def test_a_single_address_is_left_to_the_connection(value):
    assert server_addresses(value) == [value.rstrip("/")]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "--x is an empty list.*at least one address"),
        (f"{A},", "entry ''.*Write http"),
        ([A, 7], "entry 7"),
        (f"{A},127.0.0.1:8001", "entry '127.0.0.1:8001'.*form http://HOST:PORT"),
        ([A, "http://h:99999"], "entry 'http://h:99999'"),
        ([f"['{A}'", A], "form http://HOST:PORT"),
        (f"{A},{A}/", f"has {A} twice.*Remove"),
    ],
)
def test_an_error_names_value_rule_and_remedy(value, message):
    with pytest.raises(ConfigError, match=message):
        server_addresses(value, "--x")


def test_the_option_comes_from_python_a_command_line_and_yaml(tmp_path):
    """TRL's option is text, and stays text for all that read or save it."""
    assert APRILGRPOConfig(str(tmp_path), vllm_server_base_url=[A, B]).vllm_server_base_url == PAIR
    arguments = ["--output_dir", str(tmp_path), "--vllm_server_base_url", PAIR]
    (args,) = HfArgumentParser(APRILGRPOConfig).parse_args_into_dataclasses(arguments)
    assert args.vllm_server_base_url == PAIR
    for number, yaml in enumerate([f"vllm_server_base_url: {PAIR}", f"vllm_server_base_url:\n- {A}\n- {B}"]):
        config = tmp_path / f"{number}.yaml"
        config.write_text(f"output_dir: {tmp_path}\n{yaml}\n")
        (args,) = TrlParser(APRILGRPOConfig).parse_args_and_config(["--config", str(config)])
        assert args.vllm_server_base_url == PAIR


def test_a_single_address_of_the_option_stays_as_it_was_given(tmp_path):
    assert APRILGRPOConfig(str(tmp_path), vllm_server_base_url=f"{A}/").vllm_server_base_url == f"{A}/"
    assert APRILGRPOConfig(str(tmp_path)).vllm_server_base_url is None
    with pytest.raises(ConfigError, match="vllm_server_base_url has .* twice"):
        APRILGRPOConfig(str(tmp_path), vllm_server_base_url=[A, A])

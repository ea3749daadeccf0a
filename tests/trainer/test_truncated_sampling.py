"""Truncated sampling on the real server, which reports log-probabilities over the whole vocabulary."""

import pytest

from tests.trainer.test_trainer import make_trainer


pytestmark = [pytest.mark.server, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 5, "num_iterations": 2},  # the correction has a forward pass of its own
        {"top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.2},
        {"generation_kwargs": {"top_k": 5, "logit_bias": {"70": 5.0}}},
    ],
    ids=str,
)
def test_recorded_and_trained_log_probabilities_agree(server, tiny_model_dir, tmp_path, caplog, options):
    """Without a learning rate, of the same weights at any age."""
    options = {"learning_rate": 0.0, "max_steps": 3, "max_completion_length": 48, **options}
    trainer = make_trainer(server, tiny_model_dir, tmp_path, **options)
    trainer.train()
    differences = [entry.get("sampling/sampling_logp_difference/max") for entry in trainer.state.log_history]
    biases = [entry.get("april/correction/age_0/mean_log_ratio") for entry in trainer.state.log_history]
    for values in (differences, biases):
        found = [abs(value) for value in values if value is not None]
        assert found and max(found) < 1e-4
    assert "is biased" not in caplog.text

"""The device that reward functions work on."""

from __future__ import annotations

import pytest
import torch

from trl_april.training.rewards import use_device


@pytest.mark.parametrize(("device", "used"), [("cpu", []), ("cpu:0", []), ("cuda", []), ("cuda:1", [1])])
def test_a_thread_works_on_the_device_of_its_process(monkeypatch, device, used):
    found = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", found.append)
    use_device(torch.device(device))
    assert found == used

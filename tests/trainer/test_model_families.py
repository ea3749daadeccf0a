"""The families of benchmarks/models.py: a training pass computes each row as the model does alone."""

import models
import pytest
import torch
from datasets import Dataset
from model_families import FAMILIES, ORIGINAL, build, make_row

from tests.support.serverless import ServerlessTrainer
from trl_april.bridge.training_pass import rows_in_blocks
from trl_april.config import APRILGRPOConfig
from trl_april.training.forward_pass import base_attention


pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]

PROMPTS, COMPLETIONS = (5, 17), (3, 30, 70, 150)  # tokens; four completions of each prompt


def padded_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of rows as TRL pads them: prompts on the left, completions on the right."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.zeros(8, max(PROMPTS) + max(COMPLETIONS), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate((p, c) for p in PROMPTS for c in COMPLETIONS):
        columns = slice(max(PROMPTS) - prompt, max(PROMPTS) + completion)
        ids[row, columns] = torch.randint(3, 60, (prompt + completion,), generator=generator)
        mask[row, columns] = 1
        if row % len(COMPLETIONS):
            ids[row, : max(PROMPTS)] = ids[row - 1, : max(PROMPTS)]
    return ids, mask


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_is_computed_as_if_it_were_alone(name, tmp_path):
    """By the model as it is: with eager attention and without dropout. In blocks, if it allows them, and without."""
    reference, _ = build(name, tmp_path / "model")
    args = APRILGRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, report_to=[], disable_dropout=True, num_generations=4,
        per_device_train_batch_size=8,
    )  # fmt: skip
    rows = Dataset.from_list([make_row(0), make_row(1)])
    trainer = ServerlessTrainer(str(tmp_path / "model"), lambda **_: [], args, rows)
    ids, mask = padded_rows()
    kept = max(COMPLETIONS)
    passes = {}
    trainer.model.train()
    with torch.no_grad(), rows_in_blocks(trainer):
        score = trainer._get_per_token_logps_and_entropies
        passes["first"] = score(trainer.model, ids, mask, kept)[0]
        if base := base_attention(trainer.model):
            trainer.model.config._attn_implementation = base
            passes["side by side"] = score(trainer.model, ids, mask, kept)[0]
        for row, of in enumerate(mask.bool()):
            alone = ids[row, of][None]
            if "LongRoPE" in name and alone.size(1) <= ORIGINAL:
                continue  # its frequencies depend on the rows beside it
            logps = reference(alone).logits[0, :-1].float().log_softmax(-1).gather(-1, alone[0, 1:, None])[:, 0]
            tokens = int(mask[row, -kept:].sum())
            for how, found in passes.items():
                difference = float((found[row, :tokens] - logps[-tokens:]).abs().max())
                assert difference < models.EXACT, f"{how}, row {row}: {difference:.1e}"

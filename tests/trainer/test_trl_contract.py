"""The internals of TRL that trl_april relies on, so that an upgrade fails here and not in training.

If a test fails after an upgrade of TRL, read the sentence, adapt the files that it names, and only then widen the pin
in pyproject.toml.
"""

import ast
import inspect
import re
from pathlib import Path

import pytest
import trl
from packaging.version import Version
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOConfig, GRPOTrainer

import trl_april
from trl_april.bridge.compatibility import LOSS_TYPES
from trl_april.bridge.contract import Internal, broken_entries, read_contract
from trl_april.trainer import APRILGRPOTrainer
from trl_april.training.micro_batches import BY_TOKENS
from trl_april.weights.sync import ServerGeneration


PACKAGE = Path(trl_april.__file__).parent
CONTRACT = read_contract()
LISTED = {name for entry in CONTRACT for name in entry.names.partition("(")[0].split()}
TRAINERS = ("trainer", "self._trainer", "view", "self._view", "step")
OWN = {"april_enabled", "pool", "round_history"}


def test_version_is_the_minor_that_was_tested():
    assert Version(trl.__version__).release[:2] == (1, 16)


def test_the_installed_versions_fulfill_the_contract():
    assert not broken_entries()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"names": "_generate(rows)"}, r"GRPOTrainer._generate takes \(prompts\), not \(rows\)"),
        ({"names": "_generate tools _vanished"}, "GRPOTrainer has no _vanished"),
        ({"owner": "trl.Vanished"}, "Vanished has no _generate"),
        ({"passages": "never written"}, "GRPOTrainer._generate lacks `never written`"),
        ({"passages": "return prompt_ids\nself.rollout_func("}, "another order around `self.rollout_func"),
    ],
)
def test_a_broken_entry_is_a_sentence_with_the_files_to_adapt(monkeypatch, changes, words):
    entry = Internal("trl.GRPOTrainer", "_generate", "a batch", "bridge/rows.py trainer.py", "1.15")
    entry = entry._replace(**changes)
    monkeypatch.setattr("trl_april.bridge.contract.read_contract", lambda: [entry])
    (sentence,) = broken_entries()
    assert re.search(words, sentence)
    assert f"TRL {trl.__version__}" in sentence and "TRL 1.15" in sentence
    assert sentence.endswith("Adapt trl_april/bridge/rows.py, trl_april/trainer.py.")


def test_entries_name_files_of_the_package():
    files = {file for entry in CONTRACT for file in entry.files.split()}
    assert files and all((PACKAGE / file).is_file() for file in files)


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def parsed(*folders: str):
    for folder in folders:
        for path in sorted(PACKAGE.glob(folder)):
            yield path, ast.parse(path.read_text())


def test_the_list_has_every_internal_of_a_trainer_that_the_bridge_names():
    """Attributes of a trainer, private attributes of other objects, and names that are overridden or replaced."""
    unlisted = set()
    for path, tree in parsed("bridge/*.py", "trainer.py"):
        selves, own = TRAINERS, {"__init__"}
        attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        if path.name == "trainer.py":
            selves = (*TRAINERS, "self", "super()")
        else:
            own |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store) and is_self(node.value)}
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)
                is_private = re.match("_[a-z]", node.attr) and owner != "self" and node.attr not in own
                names = [node.attr] if owner in selves or is_private else []
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("replaced", "given_to")):
                names = [keyword.arg for keyword in node.keywords if keyword.arg]
            elif isinstance(node, ast.ClassDef) and node.name == "APRILGRPOTrainer":
                names = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
            unlisted |= {(path.name, name) for name in names if name not in LISTED | OWN}
    assert not {(file, name) for file, name in unlisted if not name.startswith("_april_")}


def internal_imports(path: Path, tree: ast.Module):
    """Names that a module imports from internal modules of TRL and of transformers' trainer."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            for name in node.names:
                if re.match(r"trl\.(trainer|generation|experimental)|transformers\.trainer$", node.module or ""):
                    yield path.relative_to(PACKAGE).as_posix(), f"{node.module}.{name.name}"


LEFT = {
    ("checkpoint/resume.py", "transformers.trainer.TRAINER_STATE_NAME"),
    ("commands/doctor.py", "trl.trainer.utils.create_model_from_path"),
    ("data/stream.py", "trl.trainer.utils.repeat_iterable_dataset"),
    ("engine/images.py", "trl.generation.vllm_client.to_openai_messages"),
    ("weights/sync.py", "trl.generation.vllm_generation.VLLMGeneration"),
}


def test_internal_modules_are_imported_in_the_bridge_only():
    """And in a few more places, which may become fewer."""
    found = {pair for path, tree in parsed("*.py", "*/*.py") for pair in internal_imports(path, tree)}
    assert {pair for pair in found if not pair[0].startswith("bridge/") and pair[0] != "trainer.py"} <= LEFT


# What is more than a name, a signature or a passage


def test_the_constructor_takes_what_stock_takes():
    """APRILGRPOTrainer.__init__ repeats the signature; defaults and order are part of a drop-in. One is added."""
    stock, april = (dict(inspect.signature(cls.__init__).parameters) for cls in (GRPOTrainer, APRILGRPOTrainer))
    assert april.popitem()[0] == "rollout"
    assert list(april) == list(stock)
    assert {name: p.default for name, p in april.items()} == {name: p.default for name, p in stock.items()}


def test_the_tool_loop_reads_a_view_of_the_trainer_and_writes_nothing():
    loop = inspect.getsource(GRPOTrainer._tool_call_loop)
    read = {
        "max_tool_calling_iterations", "_sync_tool_dicts", "_async_tool_dicts", "async_loop", "_get_tool_suffix_ids",
        "use_vllm", "vllm_mode", "vllm_generation", "_is_vlm", "model", "max_completion_length", "processing_class",
        "tools", "_generate_single_turn", "environment_factories", "_env_tools", "_batch_environments", "_tokenizer",
    }  # fmt: skip
    assert set(re.findall(r"self\.(\w+)", loop)) == read and not re.search(r"self\.\w+ = ", loop)


def test_a_training_that_resumes_at_its_end_would_do_one_more_step():
    assert PREFIX_CHECKPOINT_DIR == "checkpoint"
    assert "global_step >= " not in inspect.getsource(Trainer._run_epoch)


def test_which_terms_of_the_loss_depend_on_the_micro_batch():
    """A mean over a micro-batch depends on its other samples. Check new losses."""
    source = inspect.getsource(GRPOTrainer._compute_loss)
    listed = re.findall(r"self\.loss_type (?:==|in|!=) (.*?):", source)
    assert {name for names in listed for name in re.findall('"(.*?)"', names)} | {"gspo"} == set(LOSS_TYPES)
    assert source.count("mask.sum().clamp(min=1.0)") == 2  # of bnpo, and of the entropy bonus
    assert str([*BY_TOKENS]).replace("'", '"') in source


def test_only_the_training_pass_computes_entropies():
    """So it is recognized, and corrects its micro-batch."""
    assert "compute_entropy=True" not in inspect.getsource(GRPOTrainer._generate_and_score_completions)


def test_vllm_is_attached_at_the_end_of_the_constructor():
    """It is constructed with vLLM off; these are the attributes that the branch with vLLM would have set."""
    constructor = inspect.getsource(GRPOTrainer.__init__)
    branch = constructor[constructor.index("if self.use_vllm:\n            # Initialize vLLM") :]
    branch = branch[: branch.index("\n        else:")]
    set_there = set(re.findall(r"^            self\.(\w+) = ", branch, flags=re.MULTILINE))
    assert set_there == {"vllm_generation", "_last_loaded_step"}


def test_defaults_of_trl():
    """The address of a server counts as given unless it is this default; GSPO replaces these clip bounds."""
    defaults = {
        "vllm_server_base_url": None, "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000,
        "vllm_gpu_memory_utilization": 0.3, "vllm_tensor_parallel_size": 1, "vllm_max_model_length": None,
        "vllm_model_impl": "vllm", "epsilon": 0.2, "epsilon_high": None,
    }  # fmt: skip
    assert {name: getattr(GRPOConfig, name) for name in defaults} == defaults


def test_the_connection_overrides_two_methods():
    base = ServerGeneration.__mro__[1]
    overridden = {name for name in vars(ServerGeneration) if callable(vars(base).get(name))}
    assert overridden - {"__init__"} == {"_init_vllm", "sync_weights"}

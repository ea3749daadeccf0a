"""`trl-april grpo` as a file for `accelerate launch`: GRPO with partial rollouts in one or many processes.

The first process starts a vLLM server, on a GPU that training leaves free, unless one is given:

    python scripts/grpo.py --model_name_or_path MODEL --dataset_name prompts.jsonl --reward_funcs contains_answer \
        --output_dir out
    accelerate launch --config_file scripts/accelerate/ddp.yaml --num_processes 4 scripts/grpo.py ...
    accelerate launch --config_file scripts/accelerate/fsdp2.yaml --num_processes 8 scripts/grpo.py ...

    ... --vllm_server_base_url http://gpu7:8000                 # a server started by `trl-april serve MODEL`
    ... --config scripts/recipes/dapo.yaml                      # options from a file; the command line overrides
    ... --reward_funcs accuracy_reward my_module:my_function    # TRL's, and your own
    ... --use_peft --lora_r 16 --lora_target_modules all-linear # an adapter instead of the whole model
    ... --eval_strategy steps --dataset_test_split test         # a dataset with two splits
    ... --resume_from_checkpoint true                           # or auto, or a path

`scripts/launch_single_node.sh` and `scripts/launch_slurm.sh` start server and trainer together.

The dataset is a JSON, JSON-lines, Parquet or CSV file, a folder of such files, a folder of `save_to_disk`, or a name
on the hub. A `datasets:` list in the file of `--config` mixes several, as in TRL.
"""

import sys

from trl_april.commands.grpo import main


if __name__ == "__main__":
    sys.exit(main())

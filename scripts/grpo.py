"""`trl-april grpo` as a file for `accelerate launch`: its options are described there.

    accelerate launch --config_file scripts/accelerate/fsdp2.yaml --num_processes 8 scripts/grpo.py ...

`scripts/launch_single_node.sh` and `scripts/launch_slurm.sh` start a server on separate GPUs, and then this script.
"""

import sys

from trl_april.commands.grpo import main


if __name__ == "__main__":
    sys.exit(main())

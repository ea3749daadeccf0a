"""How large everything in the demo is."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Settings:
    """
    Sizes of the demo. The defaults take six to eight minutes on two cores.

    Args:
        steps (`int`, *optional*, defaults to `25`):
            Optimiser steps of each training.
        over_provisioning (`float`, *optional*, defaults to `2.0`):
            Groups in flight, as a factor of those that a step needs, of the run with APRIL.
        groups (`int`, *optional*, defaults to `8`):
            Prompts per step.
        num_generations (`int`, *optional*, defaults to `6`):
            Samples per prompt.
        micro_batch_size (`int`, *optional*, defaults to `8`):
            Samples per forward pass: the fewer, the less padding.
        max_completion_length (`int`, *optional*, defaults to `1100`):
            Limit of a completion in tokens; the longest right answer has 1000.
        learning_rate (`float`, *optional*, defaults to `3e-4`):
            Of both trainings. 1e-3 is too much: the model forgets how to end an answer.
        warm_start_steps (`int`, *optional*, defaults to `200`):
            Supervised steps before.
        warm_start_report (`int`, *optional*, defaults to `50`):
            Supervised steps between two lines of output.
        rehearsal_steps (`int`, *optional*, defaults to `2`):
            Steps of a training that is thrown away.
        report_every (`int`, *optional*, defaults to `10`):
            Steps of a training between two lines of output.
        held_out (`int`, *optional*, defaults to `128`):
            Prompts of the evaluation.
    """

    steps: int = 25
    over_provisioning: float = 2.0
    groups: int = 8
    num_generations: int = 6
    micro_batch_size: int = 8
    max_completion_length: int = 1100
    learning_rate: float = 3e-4
    warm_start_steps: int = 200
    warm_start_report: int = 50
    rehearsal_steps: int = 2
    report_every: int = 10
    held_out: int = 128

    def with_steps(self, steps: int) -> "Settings":
        """The same with another number of optimiser steps."""
        return replace(self, steps=steps)


STANDARD = Settings()

QUICK = Settings(
    steps=3,
    groups=2,
    num_generations=4,
    max_completion_length=100,
    warm_start_steps=10,
    warm_start_report=10,
    rehearsal_steps=1,
    report_every=1,
    held_out=16,
)

"""APRIL for TRL: GRPO training that does not wait for its longest completion.

Names are imported on first use, so that `import trl_april.pool.pool` loads neither torch nor TRL.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .agents.turn_engine import Turn, TurnEngine
    from .config import APRILGRPOConfig
    from .errors import (
        AprilError,
        CheckpointError,
        ConfigError,
        EngineError,
        PeerError,
        PoolError,
        ServerError,
        WeightSyncError,
    )
    from .pool.pool import Pool
    from .pool.samples import Group, Sample, Segment
    from .server.local import LocalServer
    from .trainer import APRILGRPOTrainer

__version__ = "0.1.0"

_MODULE_OF = {
    "APRILGRPOConfig": "config",
    "APRILGRPOTrainer": "trainer",
    "LocalServer": "server.local",
    "Pool": "pool.pool",
    **dict.fromkeys(("Group", "Sample", "Segment"), "pool.samples"),
    **dict.fromkeys(("Turn", "TurnEngine"), "agents.turn_engine"),
}

__all__ = [
    "APRILGRPOConfig",
    "APRILGRPOTrainer",
    "AprilError",
    "CheckpointError",
    "ConfigError",
    "EngineError",
    "Group",
    "LocalServer",
    "PeerError",
    "Pool",
    "PoolError",
    "Sample",
    "Segment",
    "ServerError",
    "Turn",
    "TurnEngine",
    "WeightSyncError",
    "__version__",
]


if not TYPE_CHECKING:  # a type checker would then accept any attribute name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f".{_MODULE_OF.get(name, 'errors')}", __name__), name)
        globals()[name] = value  # later look-ups bypass this function
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""The errors of trl_april: one root class, and each error is also the standard exception that a caller would expect.

Messages name the value that was found, the rule it breaks, and the remedy.
"""


class AprilError(Exception):
    """Root of every error that trl_april raises."""


class ConfigError(AprilError, ValueError):
    """An option, a dataset, or a combination of both that training cannot use."""


class PoolError(AprilError, RuntimeError):
    """An illegal transition of the pool, or a broken invariant. The call left the pool unchanged."""


class EngineError(AprilError, RuntimeError):
    """The rollout engine refused a request, or its answer is not a valid part of a rollout."""


class ServerError(AprilError, ConnectionError):
    """The vLLM server cannot be reached, went away, or failed."""


class WeightSyncError(AprilError, RuntimeError):
    """The server does not hold the weights that the trainer sent."""

    status: int | None = None  # of the server's answer, if it refused a request


class RoundSuspended(AprilError, RuntimeError):
    """A round was stopped on request, in this process or another process. The tokens that arrived are in the pool."""


class CheckpointError(AprilError, ValueError):
    """A checkpoint, or its partial samples, that training cannot be resumed from."""


class PeerError(AprilError, RuntimeError):
    """Another process of the training run failed or died."""


class NothingToTrain(AprilError):
    """The checkpoint to resume from is the end of its training. Handled inside the trainer."""

"""The errors of trl_april: one root, and each one also the stdlib type a caller would expect.

Every message names the value that was found, the rule it breaks and what to do about it.
"""


class AprilError(Exception):
    """Root of every error that trl_april raises on its own account."""


class ConfigError(AprilError, ValueError):
    """An option, a dataset or a combination of both that cannot be trained with."""


class PoolError(AprilError, RuntimeError):
    """An illegal transition of the pool, or a broken invariant. The pool is left as it was before the call."""


class EngineError(AprilError, RuntimeError):
    """The rollout engine answered with something that is not a valid piece of a rollout."""


class ServerError(AprilError, ConnectionError):
    """The vLLM server cannot be reached, went away, or refused a request."""


class WeightSyncError(AprilError, RuntimeError):
    """The server does not hold the weights that the trainer has just sent."""


class RoundSuspended(AprilError, RuntimeError):
    """A round was broken off on request, here or in another process. What has arrived is in the pool."""


class CheckpointError(AprilError, ValueError):
    """A checkpoint, or the partial samples in it, that training cannot be resumed from."""


class PeerError(AprilError, RuntimeError):
    """Another process of the training run has failed or died."""

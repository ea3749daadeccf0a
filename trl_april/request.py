"""The requests of a run: under which id, salt and seed a sample is asked for.

The invariant owned here: no two requests share an id, and no two segments a seed; and a sample that has no token yet
shares its cache salt only with requests of its own policy version.
"""

from __future__ import annotations

import hashlib

from .engine import GenerationRequest
from .types import Group, Sample


class RequestMaker:
    """Makes the requests of one process of a run.

    Args:
        run_id (`str`):
            Prefix of request ids and cache salts.
        seed (`int`, *optional*):
            If given, every request gets a seed derived from it, the sample, and the tokens it already has.
        resume_kv (`str`, *optional*, defaults to `"recompute"`):
            `"recompute"`: the salt is that of the present policy version, so that KV blocks computed under other
            weights can never be hit, even if a reset of the cache fails. `"reuse"`: a resumed sample has the salt of
            its first segment and finds the blocks of all of them, as far as the engine still has them. `"keep"`: the
            same, where it has to be resumed at all.
    """

    def __init__(self, run_id: str, seed: int | None = None, *, resume_kv: str = "recompute") -> None:
        self._run_id = run_id
        self._seed = seed
        self._reuses_kv = resume_kv != "recompute"
        self._made = 0

    def make(self, group: Group, sample: Sample, version: int) -> GenerationRequest:
        """A request for what `sample` still lacks, to be generated under the policy `version`."""
        self._made += 1
        salt = sample.segments[0].version if self._reuses_kv and len(sample) else version
        return GenerationRequest(
            # The counter makes the id unique: a sample is asked for once per segment, and again after a broken stream.
            request_id=f"{self._run_id}-{sample.group_id}-{sample.index}-{self._made}",
            token_ids=[*group.prompt_ids, *sample.token_ids],
            generated=len(sample),
            max_tokens=group.remaining(sample),
            cache_salt=f"{self._run_id}-{salt}",
            seed=None if self._seed is None else derive_seed(self._seed, sample),
        )


def derive_seed(seed: int, sample: Sample) -> int:
    """A seed for the next segment of `sample`: equal seeds give equal completions, so no two segments share one."""
    key = f"{seed}/{sample.group_id}/{sample.index}/{len(sample)}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1  # vLLM takes signed 64-bit

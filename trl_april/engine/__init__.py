"""A rollout engine: its interface, and the vLLM server over HTTP."""

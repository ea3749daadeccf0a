"""A local vLLM server: its process, its command line, and the middleware that runs inside it."""

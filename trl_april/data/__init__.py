"""Dataset rows for training: each exactly once per epoch, in the order of stock GRPO, and their prompts."""

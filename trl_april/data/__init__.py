"""Which dataset row comes next: exactly once per epoch, in the order of stock GRPO; and its prompt."""

"""Training on finished groups: batch, rewards, correction, micro-batches, run log."""

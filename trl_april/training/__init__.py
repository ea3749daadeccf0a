"""What TRL takes and gives: batch, rewards, correction, micro-batches, run log."""

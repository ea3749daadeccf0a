"""Several trainer processes: one quota, shards of a batch, one error everywhere, signals."""

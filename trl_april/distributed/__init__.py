"""Several trainer processes: a shared quota, shards of a batch, errors, signals."""

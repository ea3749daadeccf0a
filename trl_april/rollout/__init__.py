"""A round: the driver, its requests in flight, draining, dynamic sampling and progress."""

"""Steps after a turn of the model: tools, environments, and user-defined rollouts."""

"""What follows a turn of the model: tools, environments, and rollout functions of the user."""

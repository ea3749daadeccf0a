"""`over_provisioning="auto"`: what it learns of a training run, and which factor that speaks for."""

"""`over_provisioning="auto"`, and the simulator of `trl-april simulate`."""

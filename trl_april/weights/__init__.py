"""Trainer weights to the server: transports, names, the check that they arrived, recovery from an outage."""

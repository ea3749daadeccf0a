"""Sync of weights to the servers: transports, parameter names, verification, and recovery from outages."""

"""The commands of `trl-april`, one module each, beside which stand the parts of the larger ones."""

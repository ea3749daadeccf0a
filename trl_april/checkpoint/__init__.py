"""Partial samples in checkpoints, and where training resumes."""

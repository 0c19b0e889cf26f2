"""Grading an episode of a dataset with its own test code, in a worker process."""

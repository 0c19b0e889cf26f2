"""Grades episodes of a dataset with the dataset's own test code, in a worker process."""

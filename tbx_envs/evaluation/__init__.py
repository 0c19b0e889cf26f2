"""Evaluation: runs of repeated attempts, their files, measures, reports and comparisons; the pool."""

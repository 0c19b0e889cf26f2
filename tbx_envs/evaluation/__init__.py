"""Evaluation: evaluation runs of repeated attempts, their files, measures, reports and comparisons; the pool.

A fault is an infrastructure error, and the attempt it ended is void: it is in no measure and in every report.
"""

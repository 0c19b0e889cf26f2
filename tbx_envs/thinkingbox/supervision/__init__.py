"""Processes that start processes for us: fork servers and the check worker, and what keeps them from leaving any."""

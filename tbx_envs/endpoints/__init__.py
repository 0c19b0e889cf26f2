"""Served models: one client for agents, users and judges, and what it costs."""

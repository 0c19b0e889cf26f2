"""A policy as an OpenAI-compatible chat endpoint."""

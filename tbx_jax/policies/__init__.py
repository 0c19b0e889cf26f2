"""Policies on disk: weights, tokenizers, and the ones that are known by name."""

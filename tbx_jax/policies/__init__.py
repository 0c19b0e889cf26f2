"""Policies on disk: weights, tokenizers, and the policies that have a name."""

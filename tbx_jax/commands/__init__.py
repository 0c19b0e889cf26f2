"""Subcommands of `tbx` that need JAX."""

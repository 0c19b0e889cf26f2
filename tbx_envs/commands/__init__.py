"""`tbx`: the command, its configuration, and the subcommands that need no JAX."""

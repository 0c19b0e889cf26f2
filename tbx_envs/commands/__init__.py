"""`tbx`: the command line, its configuration records, and the subcommands that need no JAX."""

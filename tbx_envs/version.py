"""The version of the package, and its name on the package index."""

__version__ = "0.1.0"
DISTRIBUTION = "tbx-envs"  # its name on the package index; `tbx` there is another project

"""Hydra's configuration files, installed as the package `tbx_conf` so that `tbx` works from any folder."""

"""A disk that is full, as far as this process can tell."""

import contextlib
import resource


@contextlib.contextmanager
def files_limited_to(num_bytes):
    """No file of this process grows beyond this: the system then answers writes as it does on a full disk.

    Python ignores the signal that comes with it, and `write` raises OSError.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

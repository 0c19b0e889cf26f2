"""The shipped fake domain, registered once, and variants of it under names of their own."""

import itertools

import pytest

from tbx_envs.domains import load_domain, register_domain
from tbx_envs.errors import DomainError
from tbx_envs.testing.kiosk import build_kiosk

_numbers = itertools.count()


@pytest.fixture(scope="session")
def kiosk():
    try:
        return load_domain("kiosk")
    except DomainError:
        register_domain(build_kiosk())
        return load_domain("kiosk")


@pytest.fixture
def kiosk_with():
    """Registers a kiosk with more tools or other tasks; gives the domain."""

    def build(*tools, **task_changes):
        domain = build_kiosk(f"kiosk_{next(_numbers)}", tools=tools, **task_changes)
        register_domain(domain)
        return domain

    return build

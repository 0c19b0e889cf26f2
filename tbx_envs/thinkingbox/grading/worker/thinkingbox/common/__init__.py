"""The names that test code imports most."""

from pkgutil import extend_path

from .chat_types import TestContext
from .judge import Judge
from .mcp_proxy_client import SessionClientFixture

__all__ = ["Judge", "SessionClientFixture", "TestContext"]
__path__ = extend_path(__path__, __name__)

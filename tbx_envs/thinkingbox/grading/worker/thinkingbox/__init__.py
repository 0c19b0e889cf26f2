"""What test code of ThinkingBox datasets imports, in our own words.

These modules come first in the check worker, so that a verdict does not depend on what is installed. Submodules that
are not here are those of the original package, where it is installed.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)

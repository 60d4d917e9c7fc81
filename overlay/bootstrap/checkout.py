"""Serves the packages ``overlay`` and ``patches`` from the checkout, and nothing else of it.

The checkout is not put on the path: its folder names are common words.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import spec_from_file_location

NAMES = ("overlay", "patches")


class CheckoutFinder:
    """A meta path finder for exactly two top-level names; their submodules follow from the packages' paths."""

    def __init__(self, root):
        self.root = root

    def find_spec(self, name, path=None, target=None):
        if name not in NAMES:
            return None
        folder = os.path.join(self.root, name)
        return spec_from_file_location(name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder])


class ForeignPackage(ImportError):
    """Another package of the same name is importable here."""


def install(root):
    """Serve the checkout at ``root`` in this interpreter. Raises ForeignPackage, naming both."""
    if any(isinstance(finder, CheckoutFinder) or type(finder).__name__ == "CheckoutFinder" for finder in sys.meta_path):
        return
    for name in NAMES:
        spec = PathFinder.find_spec(name)
        if spec is None or not spec.origin:
            continue  # a folder without __init__.py is no package, only a folder that happens to lie there
        if os.path.realpath(os.path.dirname(os.path.dirname(spec.origin))) != os.path.realpath(root):
            raise ForeignPackage(
                f"the package {name!r} of the overlay in {root} clashes with {spec.origin}; "
                f"rename that package or take its folder off PYTHONPATH"
            )
    sys.meta_path.insert(0, CheckoutFinder(root))

"""The one error of this package."""

from __future__ import annotations


class CatalogError(ValueError):
    """A model or GPU that is unknown, or a file that does not describe one.

    The message says what is wrong, where, and what was expected.
    """

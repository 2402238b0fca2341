"""For all tests: the folder `trivet/` holds the package `trivet`. Imported here, before pytest names a test module after its folder
(`trivet.tests.…`), the name means the package; otherwise it would mean the folder."""

from contextlib import suppress

with suppress(ModuleNotFoundError):  # where a service is tested without the launcher
    import trivet  # noqa: F401

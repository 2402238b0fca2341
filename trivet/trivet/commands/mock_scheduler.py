"""`trivet mock-scheduler [MODEL]`: a scheduler without workers; all the work is done in `trivet_doubles`."""

from collections.abc import Sequence

from trivet_doubles.mock_scheduler.__main__ import main


def run(argv: Sequence[str]) -> int:
    """Run until told to stop; returns the exit code."""
    return main(argv, prog="trivet mock-scheduler")

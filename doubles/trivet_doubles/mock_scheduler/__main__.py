"""`python -m trivet_doubles.mock_scheduler` and `trivet mock-scheduler`: one mock scheduler process."""

import sys
from collections.abc import Sequence

from trivet_chassis.announcing import announce_settings
from trivet_chassis.lifecycle import EXIT_CONFIGURATION, run_service
from trivet_chassis.logging import configure_logging
from trivet_chassis.settings import explain, load_settings
from trivet_proto.errors import TrivetError

from trivet_doubles.mock_scheduler.config import MockSchedulerSettings
from trivet_doubles.mock_scheduler.server import serve

DESCRIPTION = """\
A scheduler without workers, for whoever works on frontends: it speaks the real session protocol, gives tokens that
follow from prompt, seed and position alone, at the rate that it is told, and fails on cue.

  one for a frontend on this machine       %(prog)s
  without any model files                  %(prog)s --synthetic
  50 tokens a second for each request      %(prog)s --step-time 0.02
  every third request is refused           %(prog)s --refuse-every 3
  each session ends after 100 outputs      %(prog)s --end-session-after 100"""


def main(argv: Sequence[str] | None = None, prog: str = "python -m trivet_doubles.mock_scheduler") -> int:
    """Run until told to stop; returns the exit code."""
    try:
        loaded = load_settings(
            MockSchedulerSettings, section="mock_scheduler", prog=prog, description=DESCRIPTION % {"prog": prog}, argv=argv
        )
        loaded.value.check()
    except TrivetError as error:
        print(explain(error), file=sys.stderr)
        return EXIT_CONFIGURATION
    settings = loaded.value
    written = configure_logging("mock-scheduler", settings.log_level, settings.log_format)
    announce_settings(loaded, written)
    return run_service(lambda lifecycle: serve(settings, lifecycle), name="trivet-mock-sch", drain_limit_s=settings.drain_timeout + 5.0)


if __name__ == "__main__":
    sys.exit(main())

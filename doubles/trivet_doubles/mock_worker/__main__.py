"""`python -m trivet_doubles.mock_worker` and `trivet mock-worker`: one mock worker process."""

import sys
from collections.abc import Sequence

from trivet_chassis.announcing import announce_settings
from trivet_chassis.lifecycle import EXIT_CONFIGURATION, run_service
from trivet_chassis.logging import configure_logging
from trivet_chassis.settings import explain, load_settings
from trivet_proto.errors import TrivetError

from trivet_doubles.mock_worker.config import MockWorkerSettings
from trivet_doubles.mock_worker.server import serve

DESCRIPTION = """\
A worker without a model, for whoever works on schedulers: it speaks the real protocol to a real scheduler, gives
tokens that follow from prompt, seed and position alone, takes as long as it is told to, and fails on cue.

  one for a scheduler on this machine      %(prog)s
  without any model files                  %(prog)s --synthetic
  20 ms a step, every 50th step fails      %(prog)s --step-time 0.02 --fail-every 50
  dies like a killed process at step 100   %(prog)s --die-step 100

A KV block that holds another request's content gives other tokens, a warning, and counts in
trivet_mock_worker_wrong_slots."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m trivet_doubles.mock_worker") -> int:
    """Run until told to stop; returns the exit code."""
    try:
        loaded = load_settings(MockWorkerSettings, section="mock_worker", prog=prog, description=DESCRIPTION % {"prog": prog}, argv=argv)
        loaded.value.check()
    except TrivetError as error:
        print(explain(error), file=sys.stderr)
        return EXIT_CONFIGURATION
    settings = loaded.value
    written = configure_logging("mock-worker", settings.log_level, settings.log_format)
    announce_settings(loaded, written)
    return run_service(lambda lifecycle: serve(settings, lifecycle), name="trivet-mock-wrk", drain_limit_s=10.0)


if __name__ == "__main__":
    sys.exit(main())

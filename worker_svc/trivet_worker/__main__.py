"""`python -m trivet_worker`: one worker process."""

import logging
import sys

from trivet_chassis.lifecycle import EXIT_CONFIGURATION, run_service
from trivet_chassis.logging import configure_logging
from trivet_chassis.settings import explain, load_settings
from trivet_proto.errors import TrivetError

from trivet_worker.config import WorkerSettings
from trivet_worker.server import serve


def main() -> int:
    try:
        loaded = load_settings(
            WorkerSettings,
            section="worker",
            prog="python -m trivet_worker",
            description="Trivet's worker: executes a model for the scheduler that it dials.",
        )
        loaded.value.check()
    except TrivetError as error:
        print(explain(error), file=sys.stderr)
        return EXIT_CONFIGURATION
    settings = loaded.value
    configure_logging("worker", settings.log_level, settings.log_format)
    logging.getLogger(__name__).info("settings:\n%s", loaded.describe())
    return run_service(lambda lifecycle: serve(settings, lifecycle))


if __name__ == "__main__":
    sys.exit(main())

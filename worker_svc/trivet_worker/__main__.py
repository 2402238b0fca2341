"""`python -m trivet_worker`: one worker process."""

import os
import sys

from trivet_chassis.interrupts import interrupts_ending_the_process, let_interrupts_end_the_process

with interrupts_ending_the_process():  # the imports take a second or so
    from trivet_chassis.announcing import announce_settings
    from trivet_chassis.lifecycle import EXIT_CONFIGURATION, run_service
    from trivet_chassis.logging import configure_logging
    from trivet_chassis.settings import explain, load_settings
    from trivet_proto.errors import TrivetError

    from trivet_worker.config import WorkerSettings

DRAIN_MARGIN_S = 10.0
"""How much longer than its own limit a drain may take before the process is ended: a step at hand is finished."""


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
    written = configure_logging(settings.name or "worker", settings.log_level, settings.log_format)
    announce_settings(loaded, written)
    # Read once, when torch brings up its threads, so it must be set before the import. Threads that spin long starve whatever else wants
    # the cores: beside one more busy process the library's own default made a step five times as slow.
    os.environ.setdefault("GOMP_SPINCOUNT", str(settings.spin))
    # The link and the step thread share the interpreter: a step waits for it that long when the link is put off its core while it has it.
    sys.setswitchinterval(settings.switch_interval)
    from trivet_worker.server import serve

    drain_limit_s = settings.drain_timeout + DRAIN_MARGIN_S
    return run_service(lambda lifecycle: serve(settings, lifecycle), name="trivet-worker", drain_limit_s=drain_limit_s)


if __name__ == "__main__":
    let_interrupts_end_the_process()  # until there is something to stop
    sys.exit(main())

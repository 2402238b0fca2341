"""`python -m trivet_scheduler`: one scheduler process."""

import sys

from trivet_chassis.interrupts import interrupts_ending_the_process, let_interrupts_end_the_process

with interrupts_ending_the_process():  # the imports take a second or so
    from trivet_chassis.announcing import announce_settings
    from trivet_chassis.lifecycle import EXIT_CONFIGURATION, run_service
    from trivet_chassis.logging import configure_logging
    from trivet_chassis.settings import explain, load_settings
    from trivet_proto.errors import TrivetError

    from trivet_scheduler.config import SchedulerSettings
    from trivet_scheduler.server import serve


def main() -> int:
    try:
        loaded = load_settings(
            SchedulerSettings,
            section="scheduler",
            prog="python -m trivet_scheduler",
            description="Trivet's scheduler: continuous batching and KV accounting. Frontends and workers dial it.",
        )
        loaded.value.check()
    except TrivetError as error:
        print(explain(error), file=sys.stderr)
        return EXIT_CONFIGURATION
    settings = loaded.value
    written = configure_logging("scheduler", settings.log_level, settings.log_format)
    announce_settings(loaded, written)
    return run_service(lambda lifecycle: serve(settings, lifecycle))


if __name__ == "__main__":
    let_interrupts_end_the_process()  # until there is something to stop
    sys.exit(main())

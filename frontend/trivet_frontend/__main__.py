"""`python -m trivet_frontend`: one frontend."""

import sys
from collections.abc import Sequence

from trivet_chassis.interrupts import interrupts_ending_the_process, let_interrupts_end_the_process

with interrupts_ending_the_process():  # the imports take a second or so
    from trivet_chassis.announcing import announce_settings
    from trivet_chassis.lifecycle import EXIT_CONFIGURATION, Lifecycle, run_service
    from trivet_chassis.logging import configure_logging
    from trivet_chassis.settings import explain, load_settings
    from trivet_proto.errors import TrivetError

    from trivet_frontend.config import FrontendSettings
    from trivet_frontend.server import serve

DESCRIPTION = """\
The frontend: OpenAI's HTTP API and the public gRPC API, templates and text.

It needs no model files: it fetches tokenizer and template from a scheduler. Start a scheduler first, or later: the
frontend waits for it and says on /health whether it can serve.

  python -m trivet_frontend --scheduler 127.0.0.1:7100 --port 8000
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of a frontend run with these flags."""
    try:
        loaded = load_settings(FrontendSettings, section="frontend", prog="python -m trivet_frontend", description=DESCRIPTION, argv=argv)
    except TrivetError as error:
        print(explain(error), file=sys.stderr)
        return EXIT_CONFIGURATION
    written = configure_logging("frontend", loaded.value.log_level, loaded.value.log_format)
    announce_settings(loaded, written)

    async def run(lifecycle: Lifecycle) -> None:
        await serve(loaded.value, lifecycle)

    return run_service(run)


if __name__ == "__main__":
    let_interrupts_end_the_process()  # until there is something to stop
    sys.exit(main())

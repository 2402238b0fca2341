"""The `trivet` command: finds the subcommand and turns what a person got wrong into one readable line."""

import signal
import sys
from collections.abc import Sequence

from trivet_chassis.interrupts import interrupts_ending_the_process, let_interrupts_end_the_process

with interrupts_ending_the_process():  # the imports take most of a second
    from trivet_chassis.lifecycle import EXIT_CLEAN, EXIT_CONFIGURATION
    from trivet_chassis.metrics import software_version
    from trivet_chassis.settings import nearest
    from trivet_proto.errors import TrivetError

    from trivet.commands import COMMANDS
    from trivet.output import discard_output, flush_output

USAGE = """\
usage: trivet COMMAND [ARGUMENTS]

Serve large language models: an OpenAI-compatible gateway, a scheduler and a worker.

commands:
{commands}

options:
  --help       this text; `trivet COMMAND --help` has a command's own flags
  --version    the version

To start: `trivet serve` brings up the embedded default model on http://127.0.0.1:8000 and prints how to call it.
Each service can also be started alone: python -m trivet_frontend, trivet_scheduler or trivet_worker, each with --help.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 clean, 1 a fault of ours, 2 what the caller got wrong. Without `argv` it is the program."""
    try:
        try:
            return run(list(sys.argv[1:] if argv is None else argv))
        finally:
            flush_output()
    except TrivetError as error:
        return complain(error.message)
    except BrokenPipeError:  # our reader has left: no fault of anybody's
        discard_output()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:  # before a command had its own way of stopping
        return 128 + signal.SIGINT
    finally:
        if argv is None:
            let_interrupts_end_the_process()


def run(words: list[str]) -> int:
    """Find the command and run it. Raises `TrivetError` for what the caller got wrong."""
    if not words or words[0] in ("--help", "-h"):
        print(usage(), end="")
        return EXIT_CLEAN if words else EXIT_CONFIGURATION
    if words[0] in ("--version", "-V"):
        print(f"trivet {software_version()}")
        return EXIT_CLEAN
    if words[0] == "help":
        return run([*words[1:2], "--help"])
    command = COMMANDS.get(words[0])
    if command is None:
        return complain(f"{words[0]} is no command{nearest(words[0], list(COMMANDS))} (trivet --help lists them)")
    return command.run(words[1:])


def usage() -> str:
    return USAGE.format(commands="\n".join(f"  {name:<15} {command.summary}" for name, command in COMMANDS.items()))


def complain(message: str) -> int:
    print(f"trivet: {message}", file=sys.stderr)
    return EXIT_CONFIGURATION


if __name__ == "__main__":
    sys.exit(main())

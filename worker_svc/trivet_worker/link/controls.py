"""What a scheduler may ask of a worker beside steps, done on the step thread.

An answer is nothing, or why it was not done; a worker that could not wake up has no cache and says so when the next step comes.
"""

import logging

from trivet_proto.errors import ErrorKind, TrivetError
from trivet_proto.v1 import worker_pb2

from trivet_worker.runner.runner import ModelRunner

logger = logging.getLogger(__name__)


def perform(control: worker_pb2.Control, runner: ModelRunner) -> TrivetError | None:
    """None when it is done."""
    action = control.WhichOneof("action")
    try:
        if action == "sleep":
            runner.sleep(control.sleep.level)
            logger.info("asleep, without the KV cache%s", " and the weights" if control.sleep.level > 1 else "")
        elif action == "wake_up":
            runner.wake_up()
            logger.info("awake")
        else:
            return TrivetError(ErrorKind.UNIMPLEMENTED, f"this worker has no control {action or 'of this kind'}")
    except TrivetError as error:
        return error
    except MemoryError:
        return TrivetError(ErrorKind.OUT_OF_MEMORY, "weights and KV cache do not fit into memory any more")
    except Exception as error:
        logger.exception("the control %s failed", action)
        return TrivetError(ErrorKind.INTERNAL, f"the control {action} failed: {type(error).__name__}")
    return None

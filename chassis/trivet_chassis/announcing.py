"""The final settings in the log, with where each value came from. Owns nothing; `settings.py` reads them."""

import logging
from typing import Any

from trivet_chassis.logging import WrittenFormat
from trivet_chassis.settings import Loaded

logger = logging.getLogger(__name__)

SETTINGS_MARK = "settings:"
"""How these messages begin."""


def announce_settings(loaded: Loaded[Any], written: WrittenFormat) -> None:
    """All of them in JSON. A person at a terminal is shown in one line those that somebody has set; all, at level debug."""
    if written == "json":
        logger.info("%s\n%s", SETTINGS_MARK, loaded.describe())
        return
    changed = [f"{name} = {loaded.shown(name)} [{origin}]" for name, origin in loaded.origins.items() if origin != "default"]
    logger.info("%s %s", SETTINGS_MARK, ", ".join(changed) or "all are defaults")
    logger.debug("%s\n%s", SETTINGS_MARK, loaded.describe())

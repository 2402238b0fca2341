"""Where the engine of an `LLM` runs. The one that runs in this process needs torch, which is imported here when it is asked for."""

import importlib
import os
from collections.abc import Mapping
from functools import partial

from trivet.launch.settings import LoadedServeSettings
from trivet.offline.children import open_children
from trivet.offline.engine import OpenEngine
from trivet.offline.engine_thread import EngineThread
from trivet.offline.settings import frontend_settings, plan_in_process


def child_processes(settings: LoadedServeSettings, environ: Mapping[str, str], *, shows_start: bool) -> EngineThread:
    """`shows_start`: on a terminal."""
    return _thread(partial(open_children, settings, environ, shows_start=shows_start), settings, environ)


def this_process(settings: LoadedServeSettings, environ: Mapping[str, str]) -> EngineThread:
    """Raises INVALID_ARGUMENT for settings that one process cannot have."""
    plan = plan_in_process(settings, environ)
    # Read once, when torch brings up its threads: where somebody has imported it before, it stays as it is.
    os.environ.setdefault("GOMP_SPINCOUNT", str(plan.worker.spin))
    return _thread(partial(importlib.import_module("trivet.offline.in_process").open_in_process, plan), settings, environ)


def _thread(open_engine: OpenEngine, settings: LoadedServeSettings, environ: Mapping[str, str]) -> EngineThread:
    return EngineThread(open_engine, lambda address: frontend_settings(settings, environ, address))

"""The heart: which tokens run in the next step of a replica, and what a step's answer means.

There is no prefill phase and no decode phase. Each request has tokens computed and tokens wanted; a step moves the first toward the
second. Chunked prefill, prefix hits and recomputation after a preemption all follow from that.

Pure and synchronous: no I/O, no clock but the one given, the same under the services, the tests and a simulator.
"""

from trivet_scheduler.core.book import Totals
from trivet_scheduler.core.scheduler import Scheduler
from trivet_scheduler.core.settings import CoreSettings

__all__ = ["CoreSettings", "Scheduler", "Totals"]

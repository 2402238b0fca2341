"""The worker's end of `Attach`: which scheduler (`home`), one stream to it (`attachment`), and again when it ends (`scheduler_link`)."""

from trivet_worker.link.scheduler_link import SchedulerLink

__all__ = ["SchedulerLink"]

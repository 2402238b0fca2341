"""A model as its callers know it: its names beside what the engine and the language say of it."""

from dataclasses import dataclass

from trivet_proto.errors import ErrorKind, TrivetError

from trivet_frontend.engine import ModelDescription
from trivet_frontend.serving.language import Language
from trivet_frontend.serving.sampling import SamplingDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as its callers know it. The first of `names` is what answers carry when none was asked for."""

    names: tuple[str, ...]
    root: str
    created: int
    description: ModelDescription
    language: Language
    defaults: SamplingDefaults
    system_fingerprint: str

    def check_serves(self, task: str) -> None:
        """Raises UNIMPLEMENTED, with what is served, where `task` is not."""
        if task not in self.description.tasks:
            served = ", ".join(self.description.tasks)
            raise TrivetError(ErrorKind.UNIMPLEMENTED, f"{self.names[0]} does not serve {task}; it serves {served}", param="model")

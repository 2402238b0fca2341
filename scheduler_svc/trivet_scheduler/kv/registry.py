"""Which manager serves which kind of spec: found by walking the spec's ancestors, so that a subclass inherits its parent's manager.

A registry is built once and passed on; plugins register their own kinds before the first replica attaches.
"""

from collections.abc import Callable, Iterable

from trivet_proto.errors import ErrorKind, TrivetError

from trivet_scheduler.kv.block_pool import BlockPool
from trivet_scheduler.kv.managers import FullAttentionManager, KVCacheManager
from trivet_scheduler.kv.specs import FullAttentionSpec, KVCacheSpec

MakeManager = Callable[[KVCacheSpec, int, BlockPool], KVCacheManager]


class ManagerRegistry:
    """Two maps: spec class → manager, and role → manager for groups that serve a purpose of their own (drafts, encoders)."""

    def __init__(self) -> None:
        self._by_spec: dict[type[KVCacheSpec], MakeManager] = {}
        self._by_role: dict[str, MakeManager] = {}

    def register(self, spec: type[KVCacheSpec], make: MakeManager) -> None:
        self._by_spec[spec] = make

    def register_role(self, role: str, make: MakeManager) -> None:
        self._by_role[role] = make

    def find(self, spec: type[KVCacheSpec], role: str | None = None) -> MakeManager:
        """Raises FAILED_PRECONDITION when nobody serves that kind: a check that stays under `python -O`."""
        if role is not None and role in self._by_role:
            return self._by_role[role]
        for ancestor in spec.__mro__:
            if ancestor in self._by_spec:
                return self._by_spec[ancestor]
        known = ", ".join(kind.__name__ for kind in self._by_spec)
        raise TrivetError(ErrorKind.FAILED_PRECONDITION, f"no KV cache manager serves {spec.__name__}; there are managers for {known}")

    def check(self, specs: Iterable[tuple[str, KVCacheSpec]]) -> None:
        """Every layer's spec has a manager, or the first that has none is named."""
        for layer, spec in specs:
            try:
                self.find(type(spec))
            except TrivetError as error:
                raise TrivetError(error.kind, f"layer {layer}: {error.message}") from None


def default_registry() -> ManagerRegistry:
    registry = ManagerRegistry()
    registry.register(FullAttentionSpec, FullAttentionManager)
    return registry

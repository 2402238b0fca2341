"""Which full blocks of a request can be found by others, and which of others' it can start on.

A hash is given to a block only when the step that wrote it is answered as done: what failed or was skipped was never named, so there
is nothing to take back. Chains of hashes are kept on the request, one for each block size in use.
"""

from trivet_scheduler.kv.coordinator import PrefixHit
from trivet_scheduler.kv.hashing import HashKeys, extend_chain
from trivet_scheduler.replica import Replica
from trivet_scheduler.request import Request


class Prefixes:
    """Prefix hashes of requests on replicas. Owns nothing."""

    def __init__(self, *, shared_between_requests: bool) -> None:
        self._shared = shared_between_requests

    def lookup(self, replica: Replica, request: Request) -> PrefixHit:
        """The cached blocks on a replica that a request could start on."""
        if request.wants_prompt_logprobs or not request.spec.read_prefix_cache:
            return PrefixHit()
        return replica.kv.lookup(self._chain(replica, request), request.num_tokens)

    def name_full_blocks(self, replica: Replica, request: Request, count: int) -> None:
        """Let the first `count` blocks be found: the answered steps have filled them."""
        chain = self._chain(replica, request)
        # A token that is still pending cannot be hashed: its block waits for the next answer.
        count = min(count, len(chain))
        replica.kv.name(request.block_table, chain, request.named_blocks, count)
        request.named_blocks = max(count, request.named_blocks)

    def _chain(self, replica: Replica, request: Request) -> list[bytes]:
        keys = request.spec.keys
        if not self._shared:
            # Children of one prompt still share; nobody else can know this salt.
            keys = HashKeys(keys.adapter, keys.salt + request.spec.uid)
        block_size = replica.kv.block_size
        chain = request.chains.setdefault(block_size, [])
        extend_chain(chain, request.ids_from(len(chain) * block_size), block_size, keys)
        return chain

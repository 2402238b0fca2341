"""Which build of the contract this is. Services one release apart work together in any order of upgrade."""

from trivet_proto.v1 import types_pb2

REVISION = 1
LEAST_REVISION = 1

SCHEMA = types_pb2.Schema(revision=REVISION, least_revision=LEAST_REVISION)


def agree(theirs: types_pb2.Schema) -> str | None:
    """Why the peer's contract and ours do not go together; None when they do."""
    if theirs.revision < LEAST_REVISION:
        return f"the peer speaks contract revision {theirs.revision}, at least {LEAST_REVISION} is needed: upgrade the peer"
    if theirs.least_revision > REVISION:
        return f"the peer needs contract revision {theirs.least_revision}, this service speaks {REVISION}: upgrade this service"
    return None

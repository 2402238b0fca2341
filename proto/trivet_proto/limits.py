"""Sizes that both ends of every link hold to."""

MIB = 1024 * 1024

MAX_MESSAGE_BYTES = 32 * MIB
"""The largest message any channel takes, public or internal, set on both ends. The HTTP body limit is the same."""

MAX_STREAM_MESSAGE_BYTES = MIB
"""What a sender keeps each message of a stream under, by cutting arrays into several messages."""

CHUNK_BYTES = 256 * 1024
"""One piece of a blob or bundle."""

MAX_PROMPT_LOGPROBS = 256
"""The most alternatives for each token of a prompt: a step runs thousands of those, and answers within `MAX_MESSAGE_BYTES`."""

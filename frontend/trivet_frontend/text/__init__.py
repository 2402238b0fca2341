"""Tokens to text: what bytes a token is, and the text of an answer as it grows."""

from trivet_frontend.text.output_text import IncrementalText, Release
from trivet_frontend.text.token_bytes import TokenBytes

__all__ = ["IncrementalText", "Release", "TokenBytes"]

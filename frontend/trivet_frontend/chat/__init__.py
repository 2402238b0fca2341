"""A conversation in: messages made plain, and templates that render them."""

from trivet_frontend.chat.messages import normalised_messages
from trivet_frontend.chat.template import compiled, render

__all__ = ["compiled", "normalised_messages", "render"]

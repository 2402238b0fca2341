"""A conversation in: messages made plain, and templates that render them."""

from trivet_frontend.chat.messages import last_text, normalised_messages
from trivet_frontend.chat.template import MAX_RENDERED_CHARACTERS, compiled, render, template_traits
from trivet_frontend.chat.template_traits import ArgumentsForm, TemplateTraits

__all__ = [
    "MAX_RENDERED_CHARACTERS",
    "ArgumentsForm",
    "TemplateTraits",
    "compiled",
    "last_text",
    "normalised_messages",
    "render",
    "template_traits",
]

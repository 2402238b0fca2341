"""A conversation in: messages made plain, and templates that render them."""

from trivet_frontend.chat.continuation import cut_at_continuation_mark, with_continuation_mark
from trivet_frontend.chat.messages import normalised_messages
from trivet_frontend.chat.template import MAX_RENDERED_CHARACTERS, compiled, render, template_traits
from trivet_frontend.chat.template_traits import ArgumentsForm, TemplateTraits

__all__ = [
    "MAX_RENDERED_CHARACTERS",
    "ArgumentsForm",
    "TemplateTraits",
    "compiled",
    "cut_at_continuation_mark",
    "normalised_messages",
    "render",
    "template_traits",
    "with_continuation_mark",
]

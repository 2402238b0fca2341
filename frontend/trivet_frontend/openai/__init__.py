"""The HTTP API: OpenAI's paths, bodies and streams."""

from trivet_frontend.openai.app import create_app
from trivet_frontend.openai.connection import ConnectionLimits
from trivet_frontend.openai.decoding import UnknownFields
from trivet_frontend.openai.gateway import Gateway, GatewaySettings
from trivet_frontend.openai.listener import HttpListener

__all__ = ["ConnectionLimits", "Gateway", "GatewaySettings", "HttpListener", "UnknownFields", "create_app"]

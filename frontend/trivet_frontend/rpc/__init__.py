"""The public gRPC API."""

from trivet_frontend.rpc.keys import KeyInterceptor
from trivet_frontend.rpc.service import PublicInference

__all__ = ["KeyInterceptor", "PublicInference"]

"""Text: the OpenAI gateway, the public gRPC API, templates, tokenizing, detokenizing."""

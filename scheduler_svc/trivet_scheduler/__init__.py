"""The scheduler: requests, queues, continuous batching, KV accounting, replicas. Tokens, no text and no tensors."""

"""KV cache accounting as pure data structures: specs, block pool, prefix hashes, one manager per group of layers, their coordinator."""

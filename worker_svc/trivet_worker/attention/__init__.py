"""Attention backends: what each can do, which one is taken, and the caches they read."""

"""Attention and other hot operators: what each means (`api`), and the plain form (`reference`)."""

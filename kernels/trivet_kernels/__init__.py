"""Attention and other hot operators: what each means (`api`), the plain form (`reference`), and which one runs here (`dispatch`)."""

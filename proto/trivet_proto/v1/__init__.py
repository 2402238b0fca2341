"""Stubs generated from `proto/trivet/v1` by `proto/generate.py`."""

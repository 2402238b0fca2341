"""Trivet on one machine: the `trivet` command, which starts the three services. It computes nothing itself and never imports torch."""

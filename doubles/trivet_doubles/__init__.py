"""Doubles of Trivet's services, without a model: a worker and a scheduler that speak the real protocols and fail when asked to."""

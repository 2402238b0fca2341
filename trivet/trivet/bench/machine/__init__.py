"""What the machine can do at most, and what that means for a model: its dimensions, the measured limits, the bounds of the workloads."""

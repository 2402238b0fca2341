"""From a checkpoint's tensors to a model's parameters."""

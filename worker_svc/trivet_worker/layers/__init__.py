"""What models are made of. Layers hold weights and read the rest from the forward context."""

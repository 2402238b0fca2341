"""The worker: tensors. It executes steps for a scheduler and has never heard of a chat message."""

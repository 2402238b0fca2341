"""Model architectures, by the name in a checkpoint's config."""

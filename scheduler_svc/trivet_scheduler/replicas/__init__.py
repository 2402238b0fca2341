"""The links to workers: what is sent, what comes back, and what happens when one is lost."""

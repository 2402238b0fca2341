"""One machine, three services: what to start (`plan`), and looking after it (`supervisor`)."""

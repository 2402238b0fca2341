"""What every service process needs and none should write twice: settings, logging, gRPC, health, metrics, clock, lifecycle."""

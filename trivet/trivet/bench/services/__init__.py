"""What a single service takes, between doubles of its neighbours that take no time; and what the scheduler's core takes alone."""

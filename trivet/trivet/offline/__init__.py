"""What stands behind `LLM`: its settings, the engine as child processes or in this one, and the thread in which the frontend lives."""

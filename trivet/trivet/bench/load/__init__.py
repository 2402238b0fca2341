"""The load generator: what is asked (`workloads`, `prompts`), when (`arrivals`, `drive`) and over what (`exchange`), and what came of it
(`stream`, `figures`)."""

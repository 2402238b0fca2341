"""From logits to tokens, batched. The order of the steps is part of their meaning; `sampler` has it in one place."""

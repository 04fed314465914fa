"""What both kinds of worker run: batches, the step loop, the sampler."""

"""Sessions: the prompt, the tools and their limits, and the record of an episode."""

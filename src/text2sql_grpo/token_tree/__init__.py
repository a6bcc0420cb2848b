"""Update in which each distinct token prefix of a batch is forwarded once."""

"""Generation of episodes, token by token, for a whole batch at once."""

"""Questions and databases: where they are read from, and which fields they have."""

"""Questions made for a database: from templates, logs or a teacher model."""

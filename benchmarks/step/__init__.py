"""The one-step benchmark: models, contestants, counting, and the table."""

"""Media bytes -> arrays. Nothing in here knows a model."""

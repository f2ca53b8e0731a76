"""The chat page, served as it is."""

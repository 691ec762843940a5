"""Who runs the workers of a stage."""

"""Benchmarks of this machine against its own measured ceilings."""

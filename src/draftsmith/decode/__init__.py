"""Decoding: autoregressive and speculative loops whose caches roll back exactly, on pure attention
and on hybrids.
"""

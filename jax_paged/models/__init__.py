"""Decoders and their loading. Nothing is imported here, so that reading a model's config needs no jax."""

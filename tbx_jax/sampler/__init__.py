"""The sampler: many episodes written together, each cache alive as long as its episode."""

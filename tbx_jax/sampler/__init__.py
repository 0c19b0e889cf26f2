"""The sampler: turns of many episodes decoded together, each with a cache row that lives as long as the episode."""

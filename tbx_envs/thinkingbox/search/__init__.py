"""A stand-in for the search service that the benchmark's servers expect."""

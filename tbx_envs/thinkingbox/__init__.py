"""Other people's ThinkingBox datasets: reading them, running their servers, grading with their test code."""

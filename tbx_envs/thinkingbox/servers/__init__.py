"""A dataset's own MCP servers, each session in its own processes."""

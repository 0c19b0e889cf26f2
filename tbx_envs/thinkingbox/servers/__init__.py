"""A dataset's own MCP servers, in processes of their own."""

"""The clinic as a stdio MCP server: `python -m tbx_envs.domains.clinic.server [--task UID]`."""

from tbx_envs.domains.stdio_server import main

if __name__ == "__main__":
    main("clinic")

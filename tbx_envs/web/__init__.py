"""Small web servers: access control, addresses, and running an application in a thread or in the foreground."""

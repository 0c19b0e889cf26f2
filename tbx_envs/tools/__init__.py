"""A tool and one call of it: schema, arguments, answer, session."""

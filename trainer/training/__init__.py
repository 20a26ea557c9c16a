"""The run: from a configuration to an exit code, its loop, its steps, what it saves and what it changes under way."""

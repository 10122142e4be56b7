"""Apart from the config, so that worker processes can raise it without importing JAX."""


class ConfigError(ValueError):
    """A mistake in what the user asked for. Its text is the whole message; the program prints it and exits with status 1."""

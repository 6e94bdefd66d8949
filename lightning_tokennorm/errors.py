"""The one exception of this package."""


class TokenNormError(RuntimeError):
    """Something went wrong while training that would make an update wrong, or leave other ranks waiting.

    Every rank raises it at the same exchange, so no rank is left in a collective that nobody joins. The text names
    the rank at fault, what was received, what is expected and what to change.
    """

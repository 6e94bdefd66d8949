"""The one exception of this package."""


class TokenNormError(RuntimeError):
    """Something went wrong while training that would make an update wrong, or leave other ranks waiting.

    Where that is possible every rank raises it at the same exchange, so no rank is left in a collective that nobody
    joins. The text names the rank at fault, what was received, what is expected and what to change.

    Args:
        text: The text.
        together: Whether all ranks raise this very error.
    """

    def __init__(self, text: str = "", *, together: bool = False) -> None:
        super().__init__(text)
        self.together = together
        """Whether all ranks raise this very error, so that one of them can tell it for all."""

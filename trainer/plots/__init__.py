"""Everything that imports matplotlib."""

from trainer.util.exit_codes import requires_extra

with requires_extra("plots", "a picture"):
    import matplotlib  # noqa: F401

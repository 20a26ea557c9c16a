"""Everything that imports matplotlib."""

from trainer.util.extras import needs

with needs("plots", "a picture"):
    import matplotlib  # noqa: F401

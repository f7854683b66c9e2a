"""Of the stand-in."""

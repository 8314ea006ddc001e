"""Where ranks run: a callable in, its value on every rank out."""

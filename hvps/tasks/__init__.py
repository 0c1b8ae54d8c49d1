"""Tasks that ship with hvps."""

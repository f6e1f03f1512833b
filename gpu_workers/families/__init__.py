"""Model families: base.py says what one is, registry.py which there are."""

"""`trainer tune`: the fastest plan of a recipe, found by few measured trials."""

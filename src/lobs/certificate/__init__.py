"""How far the output can have moved: the bound, its parts, and checks of saved results."""

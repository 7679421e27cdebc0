"""What both sides of a boundary know of it beforehand: token features, boundary statistics, codec priors (DESIGN
sections 3 and 4)."""

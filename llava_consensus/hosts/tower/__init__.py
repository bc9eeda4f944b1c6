"""Vision towers: taking what a method needs, and methods that act inside."""

"""What a tagged model tells about itself, module by module; results are data, drawn elsewhere."""

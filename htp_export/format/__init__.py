"""What stands in a file: keys, module paths, the module tree, signatures, parameters, and the calls of modules."""

"""The metadata of a file: keys, module paths, the module tree, signatures, parameters, calls of modules."""

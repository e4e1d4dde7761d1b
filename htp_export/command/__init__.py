"""The toolkit of commands: options that several have, progress and messages, and the program itself."""

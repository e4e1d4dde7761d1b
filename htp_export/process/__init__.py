"""The process: temporary changes of global state, user code, argument checks, garbage collection and progress."""

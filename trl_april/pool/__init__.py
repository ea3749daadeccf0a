"""The pool: groups, samples and segments, and every decision about them. Standard library only, without I/O."""

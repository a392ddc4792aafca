"""What owns a C object, one class of the verbs world per file."""

"""The maths of token reduction and the base classes of methods; torch only, no model library."""

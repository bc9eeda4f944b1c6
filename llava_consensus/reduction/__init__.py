"""The maths of token reduction and what a method is made of; torch only, no model library."""

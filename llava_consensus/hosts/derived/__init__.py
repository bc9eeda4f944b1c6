"""Hosts of transformers that no file describes: everything a method needs is derived from the loaded model.

`tap` reads queries and keys where a named module hands them to its kernel, `rows` finds which patches make which visual
token, `record` holds what was derived and proved, `model` is the view that an attachment is given, `memory` spares a
model that has not changed a second proof of its language model.
"""

"""Training with fewer tokens: a model is adapted to a method and a budget, or trained faster because every step sees
fewer visual tokens.

    llava-consensus train --model M --data-path conversations.json --images images --out checkpoints/llava-mine

A `Plan` says what is trained on what (`plan.py`) and is checked before any weight loads (`data.py`, `support.py`).
Official LLaVA is trained by its own module `llava.train.train` (`official.py`), a model of transformers by the
`Trainer` of that package (`transformers_model.py`); both with the method attached before every step (`steps.py`).
The state of a training survives a kill (`state.py`), and what comes out is a checkpoint in the layout of the one it
started from (`export.py`).
"""

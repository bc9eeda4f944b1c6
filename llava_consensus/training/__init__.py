"""Training with fewer tokens: a model is adapted to a method and a budget, or trained faster because every step sees
fewer visual tokens.

A `TrainingPlan` says what is trained on what (`plan.py`). Official LLaVA is trained by its own `llava.train.train`
(`official.py`), a model of transformers by the `Trainer` of that package; both attach the method for every step
(`trainer.py`). The result is a checkpoint in the layout of the one it started from (`run.py`).
"""

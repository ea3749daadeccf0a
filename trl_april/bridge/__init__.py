"""The room in which internals of TRL's trainer are named, beside `trainer.py`.

Rows, prompts, rewards, the tool loop and batches pass through here in both directions. What the other rooms get are
plain values and callables.
"""
